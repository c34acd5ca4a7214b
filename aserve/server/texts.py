"""Answers of ``/tokenize`` and ``/detokenize``, in vLLM's shape. Texts may be longer than the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aserve.core.errors import InvalidRequestError
from aserve.server.prepare import check_name
from aserve.server.reply import Reply, json_reply
from aserve.server.text_schema import DetokenizeRequest, TokenizeRequest
from aserve.server.whole_route import Exchange

if TYPE_CHECKING:
    from aserve.engine.engine import Engine


async def tokenize(engine: Engine, request: TokenizeRequest, exchange: Exchange) -> Reply:
    """The token ids of a text or a conversation."""
    if request.model is not None:
        check_name(engine, request.model)
    with exchange.scope.interruptible():
        ids = await _encode(engine, request)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": engine.capacity.max_model_len, "tokens": ids}
    answer["token_strs"] = [_shown(engine, i) for i in ids] if request.return_token_strs else None
    return json_reply(200, answer)


async def _encode(engine: Engine, request: TokenizeRequest) -> list[int]:
    if request.messages is None:
        text = request.prompt or ""
        return await engine.encoder.count(text, add_special_tokens=request.add_special_tokens is not False)
    options = dict(request.chat_template_kwargs or {})
    for name in ("add_generation_prompt", "allow_control_tokens"):
        if (value := getattr(request, name)) is not None:
            options[name] = value
    return await engine.encoder.count_chat([message.for_template() for message in request.messages], **options)


def _shown(engine: Engine, token_id: int) -> str:
    """One token as text; what is no character by itself is shown as U+FFFD."""
    return engine.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


async def detokenize(engine: Engine, request: DetokenizeRequest, exchange: Exchange) -> Reply:
    """The text of token ids, special tokens included."""
    if request.model is not None:
        check_name(engine, request.model)
    wrong = next((i for i in request.tokens if i >= engine.vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"tokens: {wrong} is not a token id; they go from 0 to {engine.vocab_size - 1}", param="tokens"
        )
    with exchange.scope.interruptible():
        text = await engine.encoder.decode(request.tokens)
    return json_reply(200, {"prompt": text})
