"""The matchers of an executor's slots, and the tokens that a step's rows may have next.

Numpy only; whoever has the logits applies the bits. Used on the step thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from aserve.core.step import GRAMMAR_FAILED, ScheduledSequence
from aserve.grammar.compiler import GrammarCompiler
from aserve.grammar.matcher import Bits, Matcher, Verdict


class Settlement(NamedTuple):
    """What the grammars make of a step's tokens.

    Attributes:
        token_ids: of all sampling rows; GRAMMAR_FAILED where a matcher failed.
        completed: the rows whose token completes their grammar.
    """

    token_ids: tuple[int, ...]
    completed: frozenset[int]


class GrammarSlots:
    """One matcher per slot whose sequence has a grammar."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """Without a compiler every row with a grammar fails."""
        self._compiler = compiler
        self._num_words = 1 if compiler is None else compiler.num_words
        self._matchers: dict[int, Matcher] = {}
        self._not_first: Bits | None = None
        self._threads: LLExecutor | None = None

    @property
    def num_ids(self) -> int:
        """Ids in ``[0, num_ids)`` may be allowed; none beyond."""
        return 32 * self._num_words

    def observe(self, row: ScheduledSequence) -> None:
        """Take in a row of a sequence with a grammar, sampling or not."""
        if row.new is not None:
            self._open(row)
        matcher = self._matchers[row.slot]
        if row.start + len(row.token_ids) > matcher.length:
            matcher.replay(row.start, row.token_ids)

    def close(self, slot: int) -> None:
        """Forget the slot's matcher, if there is one."""
        self._matchers.pop(slot, None)

    def matchers(self, slots: Sequence[int]) -> list[Matcher]:
        """Return those of some slots, which must have one."""
        return [self._matchers[slot] for slot in slots]

    def allowed(self, matchers: Sequence[Matcher], positions: Sequence[int], vocab_size: int) -> NDArray[np.uint8]:
        """Return which tokens may come at each row's position: [R, ceil(vocab_size / 8)], a bit per id, lowest first.

        All rows are made by one native call on several threads, without the GIL.
        """
        words = np.zeros((len(matchers), self._num_words), np.uint32)
        natives = [(m.native, row) for row, m in enumerate(matchers) if m.native is not None]
        if len(natives) == 1:
            native, row = natives[0]
            native.unsafe_compute_mask_ptr(words[row].ctypes.data, words[row].nbytes)
        elif natives:
            if self._threads is None:
                self._threads = LLExecutor()
            self._threads.unsafe_compute_mask_ptr(natives, words.ctypes.data, 4 * self._num_words, len(words))
        for row, matcher, position in zip(words, matchers, positions, strict=True):
            matcher.allow(row, position)
        bits = words.view(np.uint8)
        num_bytes = -(-vocab_size // 8)
        if bits.shape[1] < num_bytes:  # the model has rows for ids without a token
            bits = np.pad(bits, ((0, 0), (0, num_bytes - bits.shape[1])))
        return np.ascontiguousarray(bits[:, :num_bytes])

    def _open(self, row: ScheduledSequence) -> None:
        new = row.new
        assert new is not None
        assert new.sampling.grammar is not None, "only rows with a grammar come here"
        compiled = None if self._compiler is None else self._compiler.find(new.sampling.grammar)
        if compiled is not None and self._compiler is not None and self._compiler.not_first and not self._not_first:
            self._not_first = Bits(self._compiler.not_first, self._num_words)
        # It is gone only for a sequence whose request has left already: its cancellation is on the way.
        matcher = self._matchers[row.slot] = Matcher(
            None if compiled is None else compiled.start(),
            new,
            end_token_ids=() if self._compiler is None else self._compiler.end_token_ids,
            num_words=self._num_words,
            not_first=self._not_first,
        )
        matcher.replay(0, new.prior_token_ids)


def settle(token_ids: tuple[int, ...], rows: Sequence[int], matchers: Sequence[Matcher]) -> Settlement:
    """Give each matcher the token that its row has sampled; negative ones stand for a failure of another kind."""
    settled = list(token_ids)
    completed: list[int] = []
    for row, matcher in zip(rows, matchers, strict=True):
        if matcher.native is None:
            settled[row] = GRAMMAR_FAILED
        elif settled[row] >= 0:
            verdict = matcher.accept(settled[row])
            if verdict is Verdict.COMPLETE:
                completed.append(row)
            elif verdict is Verdict.FAILED:
                settled[row] = GRAMMAR_FAILED
    return Settlement(tuple(settled), frozenset(completed))
