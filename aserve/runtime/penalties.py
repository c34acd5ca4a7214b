"""Presence, frequency and repetition penalties: which tokens a slot has seen, kept on the device.

Memory is taken only for slots that use a penalty. Counting happens on the device right after sampling, so tokens of
steps still in flight are included without the host knowing them. Owned by the sampler; how much memory it can come
to is said in ``planning.activations``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.step import ScheduledSequence
from aserve.planning.activations import PENALTY_SCRATCH_BYTES
from aserve.runtime.transfer import to_device

_MIN_ROWS = 4
_ELEMENT_BYTES = 48  # of scratch per token looked at: ids, logits, counts, and what is computed from them
_MAX_STRETCH = 4  # rows that are looked at together differ at most by this factor in length
_SHORT = 64  # below this, lengths do not matter


class PenaltyRows(NamedTuple):
    """The penalised rows of a step, on the device, by ascending position.

    Attributes:
        rows: [n] int64, rows of the logits.
        states: [n] int64, rows of the state.
        positions: [n] int64, of the tokens to be sampled.
        repetition, presence, frequency: [n] float32.
        chunks: on the host, (first row, end, largest position) of the rows that are changed together.
    """

    rows: Tensor
    states: Tensor
    positions: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    chunks: tuple[tuple[int, int, int], ...]

    def part(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return rows [n], states [n] and the strengths [n, 1] of some of the rows."""
        repetition, presence, frequency = (x[first:end].unsqueeze(1) for x in self[3:6])
        return self.rows[first:end], self.states[first:end], repetition, presence, frequency


class PenaltyState:
    """Tokens by position, and counts of generated tokens, of the slots that are open.

    Logits are changed only where a token was seen: gathered through the list of tokens, changed, and scattered back.
    A token that occurs twice is written twice with the same value, so no order matters. At 200 tokens and a
    vocabulary of 49,152 that is 1/250 of the work of a dense mask.
    """

    def __init__(self, *, vocab_size: int, max_num_seqs: int, max_length: int, device: torch.device) -> None:
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._state_of: dict[int, int] = {}
        self._free: list[int] = []
        self._num_known: dict[int, int] = {}  # tokens of the slot that are in the history, or will be by then
        self._history = torch.zeros((0, max_length), dtype=torch.int32, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """What the state takes on the device now."""
        return self._history.nbytes + self._counts.nbytes

    def open(self, slot: int, first_token_id: int) -> None:
        """Start afresh for the slot, whose sequence begins with this token."""
        self.close(slot)
        if not self._free:
            self._grow()
        state = self._free.pop()
        self._state_of[slot] = state
        self._num_known[slot] = 0
        # Places not yet reached repeat a token that was seen, so the history needs no mask.
        self._history[state].fill_(first_token_id)
        self._counts[state].zero_()

    def close(self, slot: int) -> None:
        """Forget the slot; idempotent."""
        state = self._state_of.pop(slot, None)
        if state is not None:
            self._free.append(state)
            del self._num_known[slot]

    def observe(self, sequences: Iterable[ScheduledSequence], prompt_lengths: NDArray[np.int64]) -> None:
        """Note tokens that rows of open slots name for the first time: prompt chunks, all tokens of a resumed sequence.

        ``prompt_lengths`` is indexed by slot. Must come before the step's sampling.
        """
        states: list[int] = []
        positions: list[int] = []
        token_ids: list[int] = []
        generated: list[int] = []
        for row in sequences:
            state = self._state_of[row.slot]
            known = self._num_known[row.slot]
            end = row.start + len(row.token_ids)
            fresh = range(known, end)
            if fresh:
                prior = row.new.prior_token_ids if row.new is not None else ()
                tokens = prior + row.token_ids
                states += [state] * len(fresh)
                positions += fresh
                token_ids += tokens[len(tokens) - len(fresh) :]
                generated += [int(position >= prompt_lengths[row.slot]) for position in fresh]
            self._num_known[row.slot] = max(known, end) + row.samples
        if states:
            self._write(states, positions, token_ids, generated)

    def select(
        self,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        *strengths: NDArray[np.float32],
    ) -> PenaltyRows:
        """Send a step's penalised rows; ``strengths`` are repetition, presence and frequency, one per row."""
        order = np.argsort(positions, kind="stable")
        states = np.array([self._state_of[slot] for slot in slots[order].tolist()], np.int64)
        positions = positions[order]
        sent = to_device((rows[order], states, positions, *(column[order] for column in strengths)), self._device)
        return PenaltyRows(*sent, chunks=_chunks(positions.tolist()))

    def apply(self, logits: Tensor, chosen: PenaltyRows) -> None:
        """Change ``logits`` [S', V] float32 in place.

        Repetition as transformers defines it: positive logits of prompt and generated tokens are divided, negative
        ones multiplied. Then presence and frequency as OpenAI defines them, over generated tokens.
        """
        for first, end, longest in chosen.chunks:
            rows, states, repetition, presence, frequency = chosen.part(first, end)
            ids = self._history[states, :longest].long()  # [n, longest]
            places = (rows.unsqueeze(1), ids)
            values = logits[places]
            values = torch.where(values > 0, values / repetition, values * repetition)
            counts = self._counts[states.unsqueeze(1), ids]
            values -= counts * frequency + (counts > 0) * presence
            logits[places] = values

    def record(self, chosen: PenaltyRows, token_ids: Tensor) -> None:
        """Count the sampled ``token_ids`` [S'] int64 of the whole step, each at least 0."""
        sampled = token_ids[chosen.rows]
        self._history[chosen.states, chosen.positions] = sampled.int()
        self._counts[chosen.states, sampled] += 1  # states are distinct

    def _write(self, states: list[int], positions: list[int], token_ids: list[int], generated: list[int]) -> None:
        arrays = tuple(np.array(column, np.int64) for column in (states, positions, token_ids))
        columns = to_device((*arrays, np.array(generated, np.int32)), self._device)
        rows, places, ids, increments = columns
        self._history[rows, places] = ids.int()
        self._counts.index_put_((rows, ids), increments, accumulate=True)

    def _grow(self) -> None:
        old = len(self._history)
        added = min(max(old, _MIN_ROWS), self._max_num_seqs - old)
        self._history = torch.cat([self._history, self._history.new_zeros((added, self._history.shape[1]))])
        self._counts = torch.cat([self._counts, self._counts.new_zeros((added, self._counts.shape[1]))])
        self._free += range(old + added - 1, old - 1, -1)


def _chunks(lengths: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Split ascending lengths where padding to the longest would cost too much time or memory."""
    chunks: list[tuple[int, int, int]] = []
    first = 0
    for i, length in enumerate(lengths):
        too_large = (i + 1 - first) * length * _ELEMENT_BYTES > PENALTY_SCRATCH_BYTES
        if i > first and (too_large or length > _MAX_STRETCH * max(lengths[first], _SHORT)):
            chunks.append((first, i, lengths[i - 1]))
            first = i
    return (*chunks, (first, len(lengths), lengths[-1]))
