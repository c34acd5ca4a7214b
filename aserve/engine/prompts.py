"""Prompts to token ids, in worker threads, few at a time, and never more text than could fit.

A text with more bytes than the longest possible prompt has is refused before it is tokenised, so a prompt of 100 MB
costs nothing; of a chat that is the text of all messages and options, whether the template shows it or not. Used by
``Engine.encode`` and ``Engine.encode_chat``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread

from aserve.core.capacity import Capacity
from aserve.core.errors import AserveError, PromptError
from aserve.engine.admission import check_input, fit, too_long
from aserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_THREADS = 2
_USUAL_CHARACTERS = 16
"""No text of so few characters per token of the context is worth measuring the vocabulary for."""

_SHORT = frozenset({"role", "type"})


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
        return await anyio.to_thread.run_sync(self._run, work, text, "prompt", limiter=self._limiter)

    async def encode_chat(self, messages: Sequence[Any], /, **template_options: Any) -> list[int]:
        """Return the ids of a chat prompt. Raises InvalidRequestError, ContextLengthError."""
        work = partial(self._tokenizer.encode_chat, messages, **template_options)
        texts = [list(messages), template_options]
        return await anyio.to_thread.run_sync(self._run, work, texts, "messages", limiter=self._limiter)

    async def encode_input(
        self,
        texts: tuple[str, ...],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        param: str = "input",
    ) -> tuple[list[int], int]:
        """Return the ids of a text, or pair of texts, that has no answer, and where the second text begins (0: none).

        Args:
            max_tokens: cut them to so many tokens; None refuses what is too long.

        Raises InvalidRequestError, ContextLengthError that names ``param``.
        """
        work = partial(
            self._tokenizer.encode_input,
            texts,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            param=param,
        )
        return await anyio.to_thread.run_sync(
            self._run_input, work, texts, param, max_tokens is not None, limiter=self._limiter
        )

    async def count(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, however many. Raises InvalidRequestError."""
        work = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await anyio.to_thread.run_sync(_guarded, work, limiter=self._limiter)

    async def count_chat(self, messages: Sequence[Any], /, **template_options: Any) -> list[int]:
        """Return the ids of a chat prompt, however many. Raises InvalidRequestError."""
        work = partial(self._tokenizer.encode_chat, messages, **template_options)
        return await anyio.to_thread.run_sync(_guarded, work, limiter=self._limiter)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        work = partial(self._tokenizer.decode, ids, skip_special_tokens=False)
        return await anyio.to_thread.run_sync(_guarded, work, limiter=self._limiter)

    def _run(self, work: Callable[[], list[int]], texts: Any, param: str) -> list[int]:
        at_least = self._least_tokens(texts)
        if at_least >= self._capacity.max_length:
            raise too_long(at_least, self._capacity, param=param, at_least=True)
        ids = _guarded(work)
        fit(self._capacity, len(ids), None, param=param)
        return ids

    def _run_input(
        self, work: Callable[[], tuple[list[int], int]], texts: Any, param: str, is_cut: bool
    ) -> tuple[list[int], int]:
        if not is_cut:
            check_input(self._capacity, self._least_tokens(texts), param=param, at_least=True)
        ids, second_start = _guarded(work)
        check_input(self._capacity, len(ids), param=param)
        return ids, second_start

    def _least_tokens(self, texts: Any) -> int:
        """How many tokens texts have at least; 0 where they are short, which spares looking."""
        num_characters = _num_characters(texts)
        if num_characters <= _USUAL_CHARACTERS * self._capacity.max_length:
            return 0
        return -(-num_characters // self._measure_longest_token())

    def _measure_longest_token(self) -> int:
        if self._longest_token is None:
            token_bytes = self._tokenizer.token_bytes
            lengths = (len(token_bytes(i)) for i in range(self._tokenizer.vocab_size))
            self._longest_token = max(1, max(lengths, default=1))
        return self._longest_token


def _guarded(work: Callable[[], T]) -> T:
    """Do it; a fault of the tokenizer is a PromptError."""
    try:
        return work()
    except AserveError:
        raise
    except BaseException as error:  # a panic in Rust is no Exception; nothing else ends a worker thread this way
        logger.error("a prompt could not be encoded", exc_info=error)
        raise PromptError("this prompt could not be encoded, by a fault of the server; others go on") from None


def _num_characters(values: Any) -> int:
    """Characters of all texts in messages and options, which may be nested deeper than Python's stack.

    Roles and types do not count: they are few, and short texts are not to seem long by them.
    """
    total, rest = 0, [values]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            rest += [item for key, item in cast(dict[Any, Any], value).items() if key not in _SHORT]
        elif isinstance(value, list | tuple):
            rest += cast(Sequence[Any], value)
    return total
