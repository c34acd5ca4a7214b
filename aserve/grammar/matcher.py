"""One sequence's place in its grammar: which tokens it has taken, and which ids may end it.

Knows nothing of slots or batches. Used on the step thread alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from aserve.core.step import NewSequence
from aserve.grammar.source import explain

logger = logging.getLogger(__name__)

Words = NDArray[np.uint32]


class Verdict(Enum):
    """What a sampled token has done."""

    GOES_ON = "goes on"
    COMPLETE = "complete"  # nothing may follow but an end
    FAILED = "failed"


class Bits:
    """Some ids as bits to set or clear in a row of words."""

    __slots__ = ("_bits", "_words")

    def __init__(self, ids: Iterable[int], num_words: int) -> None:
        by_word: dict[int, int] = {}
        for token_id in ids:
            if 0 <= token_id < 32 * num_words:
                by_word[token_id >> 5] = by_word.get(token_id >> 5, 0) | 1 << (token_id & 31)
        self._words = np.array(list(by_word), np.int64)
        self._bits = np.array(list(by_word.values()), np.uint32)

    def clear(self, row: Words) -> None:
        row[self._words] &= ~self._bits

    def set(self, row: Words) -> None:
        row[self._words] |= self._bits


class Matcher:
    """Walks one grammar along one sequence.

    Attributes:
        native: None once it has failed, or when the grammar was not there.
        length: tokens of the sequence, its prompt's included, up to which the grammar has been followed.
    """

    __slots__ = ("_end_ids", "_ends", "_first", "_min_length", "_not_content", "_not_first", "length", "native")

    def __init__(
        self,
        native: LLMatcher | None,
        new: NewSequence,
        *,
        end_token_ids: Sequence[int],
        num_words: int,
        not_first: Bits | None = None,
    ) -> None:
        """``not_first``: ids that the text must not begin with."""
        sampling = new.sampling
        self.native = native
        self.length = new.num_prompt_tokens
        self._min_length = new.num_prompt_tokens + sampling.min_tokens
        self._end_ids = frozenset(sampling.stop_token_ids)
        self._first = new.num_prompt_tokens
        self._not_first = not_first
        self._ends = Bits(self._end_ids, num_words)
        # an id that ends texts is none itself, also when the request ignores that it ends them
        self._not_content = Bits({*self._end_ids, *end_token_ids}, num_words)

    def replay(self, start: int, token_ids: Sequence[int]) -> None:
        """Take the tokens at positions from ``start`` that are generated and have not been taken yet.

        Tokens are taken as they are sampled, so these are those of a sequence that was preempted.
        """
        missed = token_ids[max(0, self.length - start) :]
        if not missed or self.native is None:
            return
        self.length += len(missed)
        if not self.native.consume_tokens(list(missed)):
            self._fail("it does not take its own tokens again")

    def accept(self, token_id: int) -> Verdict:
        """Take a token that was sampled within ``allow``."""
        if self.native is None:
            return Verdict.FAILED
        if token_id in self._end_ids:
            return Verdict.GOES_ON  # the scheduler sees that it ends here
        self.length += 1
        if not self.native.consume_token(token_id):
            self._fail("it does not take a token that it allowed")
            return Verdict.FAILED
        return Verdict.COMPLETE if self.native.is_stopped() else Verdict.GOES_ON

    def allow(self, row: Words, position: int) -> None:
        """Finish the mask that the grammar has made for the token at ``position``: where may it end?

        All bits are cleared after a failure.
        """
        native = self.native
        if native is not None and native.is_error():
            self._fail("it cannot go on")
        if self.native is None:
            row.fill(0)
            return
        self._not_content.clear(row)
        if self._not_first is not None and position == self._first:
            self._not_first.clear(row)
        if self.native.is_accepting() and (position >= self._min_length or not row.any()):
            self._ends.set(row)

    def _fail(self, what: str) -> None:
        assert self.native is not None, "it fails once"
        logger.error("a grammar failed, and its request with it: %s: %s", what, explain(self.native.get_error()))
        self.native = None
