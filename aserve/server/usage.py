"""Counts the tokens of one request, for ``usage`` and for the log."""

from __future__ import annotations

from typing import Any

from aserve.core.request import TextDelta


class Usage:
    """Prompt tokens count once per prompt, completion tokens over all choices.

    ``cached_tokens`` is the number of prompt tokens taken from the prefix cache: of a prompt with several choices
    the smallest number among them, since the others share what the first one computed.
    """

    __slots__ = ("_cached", "completion_tokens", "num_choices", "prompt_tokens")

    def __init__(self, prompt_tokens: int, num_choices: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.num_choices = num_choices
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, delta: TextDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        prompt = delta.choice // self.num_choices
        cached = delta.num_cached_tokens
        if cached < self._cached.get(prompt, cached + 1):
            self._cached[prompt] = cached

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def report(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
