"""Counts the tokens of one request, for ``usage`` and for the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aserve.core.request import TextDelta

if TYPE_CHECKING:
    from aserve.engine.generation import Generation


class Usage:
    """Prompt tokens count once per prompt, completion tokens over all choices, as the generations count them.

    ``cached_tokens`` is the number of prompt tokens taken from the prefix cache: of a prompt with several choices
    the smallest number among them, since the others share what the first one computed.
    """

    __slots__ = ("_cached", "_generations", "num_choices", "prompt_tokens")

    def __init__(self, prompt_tokens: int, num_choices: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.num_choices = num_choices
        self._generations: list[Generation] = []
        self._cached: dict[int, int] = {}

    def attach(self, generation: Generation) -> None:
        """Count this one's tokens: those that have been read so far."""
        self._generations.append(generation)

    def add(self, delta: TextDelta) -> None:
        """Note what a delta says of the prefix cache."""
        prompt = delta.choice // self.num_choices
        cached = delta.num_cached_tokens
        if cached < self._cached.get(prompt, cached + 1):
            self._cached[prompt] = cached

    @property
    def completion_tokens(self) -> int:
        return sum(generation.num_completion_tokens for generation in self._generations)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def report(self) -> dict[str, Any]:
        completion_tokens = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
