"""From a checked request to what the engine runs: ids, sampling parameters with all defaults filled in.

Needs the engine's tokenizer, capacity and names; sends nothing. Called inside the request scope before admission, so
everything wrong with a request is known while its answer can still have a status.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aserve.core.errors import InvalidRequestError, ModelNotFoundError
from aserve.core.request import GenerationRequest
from aserve.server.chat_schema import ChatRequest
from aserve.server.completion_schema import DEFAULT_MAX_TOKENS, CompletionRequest
from aserve.server.schema import SamplingFields
from aserve.server.structured import compile_for

if TYPE_CHECKING:
    from aserve.engine.engine import Engine


_SAME_NAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "priority",
)
"""Fields that are called the same as the engine's options and mean the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request's work: a generation for each prompt, and how to answer.

    Attributes:
        id, created, model: repeated in every chunk of the answer.
        num_choices: choices per prompt; choice ``c`` of prompt ``p`` has the index ``p * num_choices + c``.
        logprobs: whether log-probabilities were asked for.
        include_usage: a last chunk with the usage follows the stream.
        continuous_usage: every chunk has the usage so far.
    """

    id: str
    created: int
    model: str
    chat: bool
    requests: tuple[GenerationRequest, ...]
    num_choices: int
    logprobs: bool
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)


async def prepare_chat(engine: Engine, request: ChatRequest) -> Job:
    """Render and tokenise the conversation. Raises InvalidRequestError, ContextLengthError, ModelNotFoundError."""
    check_model(engine, request)
    _check_size(engine, 1, request.num_choices)
    options = dict(request.chat_template_kwargs or {})
    if request.add_generation_prompt is not None:
        options["add_generation_prompt"] = request.add_generation_prompt
    if request.allow_control_tokens:
        options["allow_control_tokens"] = True
    with engine.preparing(request.num_choices):
        await _compile(engine, request)
        ids = await engine.encode_chat([message.for_template() for message in request.messages], **options)
    if not ids:
        raise InvalidRequestError("the messages give an empty prompt", param="messages")
    fitted = engine.fit(len(ids), request.token_limit, param="messages")
    return _job(engine, request, [ids], [fitted], chat=True)


async def prepare_completion(engine: Engine, request: CompletionRequest) -> Job:
    """Tokenise the prompts. Raises InvalidRequestError, ContextLengthError, ModelNotFoundError."""
    check_model(engine, request)
    _check_size(engine, len(request.prompts), request.num_choices)
    special = request.add_special_tokens is not False
    prompts: list[list[int]] = []
    fitted: list[int] = []
    limit = DEFAULT_MAX_TOKENS if request.token_limit is None else request.token_limit
    with engine.preparing(len(request.prompts) * request.num_choices):
        await _compile(engine, request)
        for prompt in request.prompts:
            ids = await engine.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            if not ids:
                raise InvalidRequestError("the prompt has no tokens", param="prompt")
            fitted.append(engine.fit(len(ids), limit, param="prompt"))
            prompts.append(ids)
    return _job(engine, request, prompts, fitted, chat=False)


def check_model(engine: Engine, request: SamplingFields) -> None:
    """Raise ModelNotFoundError unless the requested model is served here, TaskNotOfferedError if it has no answers."""
    check_name(engine, request.model)
    engine.require("generate")


def check_name(engine: Engine, name: str) -> None:
    """Raise ModelNotFoundError unless a model of this name is served here."""
    if name not in engine.model_names:
        shown = name if len(name) <= 100 else name[:100] + "…"
        served = ", ".join(engine.model_names)
        raise ModelNotFoundError(f"the model '{shown}' is not served here; served: {served}", param="model")


async def _compile(engine: Engine, request: SamplingFields) -> None:
    """Have the request's grammar ready, if it has one. Raises as ``compile_for``."""
    if request.constraint is not None:
        await compile_for(engine, request.constraint)


def _check_size(engine: Engine, num_prompts: int, num_choices: int) -> None:
    """Refuse what the queue could never take, however often it is tried. Raises InvalidRequestError."""
    most = engine.max_sequences
    if num_prompts * num_choices > most:
        raise InvalidRequestError(
            f"{num_prompts} prompt{'s' if num_prompts > 1 else ''} with n = {num_choices} need "
            f"{num_prompts * num_choices} places; this server has {most}, in the batch and in the queue together",
            param="n" if num_prompts <= most and num_choices > 1 else "prompt",
        )


def _options(request: SamplingFields) -> dict[str, Any]:
    """The fields as the options that programs give, those that say something; the engine fills in the rest.

    Whether token ids exist is checked at admission.
    """
    options: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    options |= {
        "n": request.num_choices,
        "stop": tuple(request.stop),
        "logit_bias": dict(request.logit_bias),
        "include_stop": bool(request.include_stop_str_in_output),
        "cache_salt": (request.cache_salt or "").encode(),
    }
    if request.top_k is not None:
        options["top_k"] = max(request.top_k, 0)
    if request.seed is not None:
        options["seed"] = request.seed % 2**64
    if request.constraint is not None:
        options["grammar"] = request.constraint.grammar
    if request.num_logprobs is not None:
        options["num_logprobs"] = request.num_logprobs
    return options


def _job(
    engine: Engine, request: SamplingFields, prompts: list[list[int]], max_tokens: list[int], *, chat: bool
) -> Job:
    job_id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
    stream_options = request.stream_options
    options = _options(request)
    generations = tuple(
        engine.make_request(options, prompt_token_ids=ids, max_tokens=limit, request_id=f"{job_id}-{index}")
        for index, (ids, limit) in enumerate(zip(prompts, max_tokens, strict=True))
    )
    return Job(
        id=job_id,
        created=int(time.time()),
        model=request.model,
        chat=chat,
        requests=generations,
        num_choices=request.num_choices,
        logprobs=request.num_logprobs is not None,
        stream=bool(request.stream),
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
    )
