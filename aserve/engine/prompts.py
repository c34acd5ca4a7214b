"""Prompts to token ids, in worker threads, few at a time, and never more text than could fit.

A text with more bytes than the longest possible prompt has is refused before it is tokenised, so a prompt of 100 MB
costs nothing. Used by ``Engine.encode`` and ``Engine.encode_chat``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import anyio
import anyio.to_thread

from aserve.core.capacity import Capacity
from aserve.core.errors import AserveError, PromptError
from aserve.engine.admission import fit, too_long
from aserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NUM_THREADS = 2
_USUAL_CHARACTERS = 16
"""No text of so few characters per token of the context is worth measuring the vocabulary for."""


class PromptEncoder:
    """Encodes for one tokenizer and capacity. Made within the event loop."""

    def __init__(self, tokenizer: Tokenizer, capacity: Capacity) -> None:
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._limiter = anyio.CapacityLimiter(_NUM_THREADS)
        self._longest_token: int | None = None

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Raises InvalidRequestError, ContextLengthError.

        Cancelling waits for the tokenizer, which takes a second or so at worst.
        """
        work = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await anyio.to_thread.run_sync(self._run, work, len(text), "prompt", limiter=self._limiter)

    async def encode_chat(self, messages: Sequence[Any], /, **template_options: Any) -> list[int]:
        """Return the ids of a chat prompt. Raises InvalidRequestError, ContextLengthError."""
        work = partial(self._tokenizer.encode_chat, messages, **template_options)
        num_characters = sum(map(_num_characters, messages))
        return await anyio.to_thread.run_sync(self._run, work, num_characters, "messages", limiter=self._limiter)

    def _run(self, work: Callable[[], list[int]], num_characters: int, param: str) -> list[int]:
        if num_characters > _USUAL_CHARACTERS * self._capacity.max_length:
            at_least = -(-num_characters // self._measure_longest_token())
            if at_least >= self._capacity.max_length:
                raise too_long(at_least, self._capacity, param=param, at_least=True)
        try:
            ids = work()
        except AserveError:
            raise
        except BaseException as error:  # a panic in Rust is no Exception; nothing else ends a worker thread this way
            logger.error("a prompt could not be encoded", exc_info=error)
            raise PromptError("this prompt could not be encoded, by a fault of the server; others go on") from None
        fit(self._capacity, len(ids), None, param=param)
        return ids

    def _measure_longest_token(self) -> int:
        if self._longest_token is None:
            token_bytes = self._tokenizer.token_bytes
            lengths = (len(token_bytes(i)) for i in range(self._tokenizer.vocab_size))
            self._longest_token = max(1, max(lengths, default=1))
        return self._longest_token


def _num_characters(message: Any) -> int:
    """Characters of a message's content: a string, or parts with a text. Other shapes are the template's to refuse."""
    content: Any = cast(dict[str, Any], message).get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    texts = [cast(dict[str, Any], part).get("text") for part in cast(list[Any], content) if isinstance(part, dict)]
    return sum(len(text) for text in texts if isinstance(text, str))
