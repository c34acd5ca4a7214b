"""Each slot's sampling parameters as columns, so that a step picks its rows with one index.

Host memory only: a step sends the rows it needs. Knows the parameters, not the logits. Owned by the sampler.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aserve.core.request import SamplingParams
from aserve.core.step import NewSequence

GREEDY_BELOW = 1e-5
"""Temperatures up to this count as 0: dividing by less says nothing more than the argmax does."""


class Feature(IntFlag):
    """What a slot needs beyond the argmax of its logits."""

    SAMPLED = 1
    PENALISED = 2
    BIASED = 4
    MIN_TOKENS = 8
    LOGPROBS = 16
    GRAMMAR = 32


class SlotSampling:
    """Columns of parameters, indexed by slot."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.features = np.zeros(max_num_seqs, np.uint8)
        self.temperatures = np.zeros(max_num_seqs, np.float32)
        self.top_ks = np.zeros(max_num_seqs, np.int32)
        self.top_ps = np.ones(max_num_seqs, np.float32)
        self.min_ps = np.zeros(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.num_logprobs = np.zeros(max_num_seqs, np.int64)
        self.prompt_lengths = np.zeros(max_num_seqs, np.int64)
        self.min_lengths = np.zeros(max_num_seqs, np.int64)  # prompt and generated tokens before a stop id may come
        nothing = np.zeros(0, np.int64)
        self.bias_ids = [nothing] * max_num_seqs
        self.bias_values = [np.zeros(0, np.float32)] * max_num_seqs
        self.stop_ids = [nothing] * max_num_seqs

    def assign(self, slot: int, new: NewSequence) -> None:
        """Take the parameters of the sequence that now has the slot.

        Ids in ``logit_bias`` and ``stop_token_ids`` beyond the model's vocabulary have no logit, so they are left out.
        """
        params = new.sampling
        sampled = params.temperature > GREEDY_BELOW
        self.temperatures[slot] = params.temperature if sampled else 0.0
        self.top_ks[slot] = min(params.top_k, self._vocab_size)
        self.top_ps[slot] = params.top_p
        self.min_ps[slot] = params.min_p
        self.seeds[slot] = params.seed
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.num_logprobs[slot] = params.num_logprobs or 0
        self.prompt_lengths[slot] = new.num_prompt_tokens
        self.min_lengths[slot] = new.num_prompt_tokens + params.min_tokens
        bias = [(i, value) for i, value in params.logit_bias if 0 <= i < self._vocab_size]
        self.bias_ids[slot] = np.array([i for i, _ in bias], np.int64)
        self.bias_values[slot] = np.array([value for _, value in bias], np.float32)
        stop_ids = [i for i in params.stop_token_ids if 0 <= i < self._vocab_size]
        constrained = params.grammar is not None  # then its matcher holds stop ids back, as far as it can do without
        held_back = params.min_tokens > 0 and not constrained
        self.stop_ids[slot] = np.array(stop_ids if held_back else [], np.int64)
        self.features[slot] = (
            sampled * Feature.SAMPLED
            | _is_penalised(params) * Feature.PENALISED
            | bool(bias) * Feature.BIASED
            | (held_back and bool(stop_ids)) * Feature.MIN_TOKENS
            | (params.num_logprobs is not None) * Feature.LOGPROBS
            | constrained * Feature.GRAMMAR
        )

    def edits(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> tuple[NDArray[Any], ...] | None:
        """Return what to add to logits for biases and ``min_tokens``: (rows, ids, values), or None if nothing.

        ``positions``: of the tokens to be sampled. Values are float32; a stop id that may not come yet gets -inf. A
        pair of row and id can occur twice.
        """
        rows: list[NDArray[np.int64]] = []
        ids: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []

        def add(row: np.integer[Any], some_ids: NDArray[np.int64], some_values: NDArray[np.float32]) -> None:
            rows.append(np.full(len(some_ids), row, np.int64))
            ids.append(some_ids)
            values.append(some_values)

        features = self.features[slots]
        for row in np.flatnonzero(features & Feature.BIASED):
            slot = slots[row]
            add(row, self.bias_ids[slot], self.bias_values[slot])
        held_back = (features & Feature.MIN_TOKENS) != 0
        for row in np.flatnonzero(held_back & (positions < self.min_lengths[slots])):
            stop_ids = self.stop_ids[slots[row]]
            add(row, stop_ids, np.full(len(stop_ids), -np.inf, np.float32))
        if not rows:
            return None
        return np.concatenate(rows), np.concatenate(ids), np.concatenate(values)


def _is_penalised(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
