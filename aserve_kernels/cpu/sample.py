"""Sampling on the CPU; the contract is ``kernel_set.Sample``.

Each row takes the cheapest way that its own arguments allow (greedy, unfiltered, filtered), the rows of one way
together. The vocabulary is not sorted: a filtered row looks at its largest logits, 64 at first, and at more only if
its filters reach further. Sums over the vocabulary go by fixed tiles, so that a row's result has no part of its batch.
What is done once per token of the vocabulary is torch's; the small rest is numpy's, whose calls cost a quarter as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_TILE = 128
_SMALLEST_EXPONENT = -87.0
_CANDIDATES = (64, 1024, 8192)  # how many of the largest logits a filtered row looks at, then all

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, uniforms: Tensor
) -> Tensor:
    """Return one token id per row."""
    greedy = temperatures.numpy() == 0
    if greedy.all():
        return torch.from_numpy(_largest_ids(logits))
    limits = top_ks.numpy().astype(np.int64)
    limits[limits >= logits.shape[1]] = 0
    rows = _Rows(logits, limits, *(x.numpy().astype(np.float64) for x in (temperatures, top_ps, min_ps, uniforms)))
    filtered = (rows.top_ks > 0) | (rows.top_ps < 1) | (rows.min_ps > 0)
    tokens = np.empty(len(logits), dtype=np.int64)
    # A NaN must not end in a warning: what a row of them draws is of no matter, and the model runner reports it.
    with np.errstate(all="ignore"):
        for members, way in (
            (greedy, lambda rows: _largest_ids(rows.logits)),
            (~greedy & ~filtered, _draw_by_id),
            (~greedy & filtered, _draw_filtered),
        ):
            if members.any():
                tokens[members] = way(rows.select(members))
    return torch.from_numpy(tokens)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The arguments of some rows, as in the contract; a top_k that keeps all is 0."""

    logits: Tensor  # [R, V] float32
    top_ks: Integers  # [R], like the rest
    temperatures: Floats
    top_ps: Floats
    min_ps: Floats
    uniforms: Floats

    def select(self, members: NDArray[np.bool_]) -> _Rows:
        """Return the rows that ``members`` [R] names; the logits are copied unless that is all of them."""
        if members.all():
            return self
        return _Rows(
            self.logits[torch.from_numpy(members)],
            self.top_ks[members],
            self.temperatures[members],
            self.top_ps[members],
            self.min_ps[members],
            self.uniforms[members],
        )

    def weights(self) -> Tensor:
        """Return exp((logit - largest logit) / temperature) in tiles, [R, V / tile, tile] float32, filled up with 0.

        The largest is subtracted before the division: a tiny temperature must not make an infinity. Weights end at the
        smallest normal float32, 1e-38 of the largest: denormal ones make exp 25 times slower, zeros 5 times.
        """
        exponents = self.logits - self.logits.amax(-1, keepdim=True)
        if (self.temperatures != 1).any():
            exponents.div_(torch.from_numpy(self.temperatures).float().unsqueeze(1))
        weights = exponents.clamp_(min=_SMALLEST_EXPONENT).exp_()
        missing = -weights.shape[1] % _TILE
        return (F.pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, _TILE)


def _largest_ids(logits: Tensor) -> Integers:
    """Return the first of the largest in each row, 20 times as fast as torch's argmax."""
    return logits.numpy().argmax(axis=-1)


def _draw_by_id(rows: _Rows) -> Integers:
    """Draw first the tile in which the cumulative weight passes the uniform, then the place within it."""
    weights = rows.weights()
    each = np.arange(len(weights))
    cumulative = weights.sum(-1).numpy().astype(np.float64).cumsum(-1)
    # A uniform of 0 must pass over what has no weight but the smallest, such as a masked first token.
    targets = np.maximum(rows.uniforms, 1e-12) * cumulative[:, -1]
    tiles = np.minimum((cumulative <= targets[:, None]).sum(-1), weights.shape[1] - 1)
    ends = cumulative[each, tiles]
    starts = np.where(tiles > 0, cumulative[each, tiles - 1], 0.0)
    within = weights.numpy()[each, tiles].astype(np.float64).cumsum(-1)
    places = _places(within, (targets - starts) / (ends - starts))
    return np.minimum(tiles * _TILE + places, rows.logits.shape[1] - 1)


def _places(cumulative: Floats, shares: Floats) -> Integers:
    """Return the first place in each row of ``cumulative`` [R, n] that exceeds ``shares`` [R] of its end."""
    places = (cumulative <= (shares * cumulative[:, -1])[:, None]).sum(-1)
    last = cumulative.argmax(-1)  # the last with a weight; rounding must not lead beyond it
    return np.minimum(places, last)


def _draw_filtered(rows: _Rows) -> Integers:
    vocab_size = rows.logits.shape[1]
    masses = np.full(len(rows.logits), math.inf)
    needs_mass = (rows.top_ps < 1) & (rows.top_ks == 0)
    if needs_mass.any():
        masses[needs_mass] = rows.select(needs_mass).weights().sum(-1).numpy().astype(np.float64).sum(-1)
    tokens = np.empty(len(masses), dtype=np.int64)
    left = np.arange(len(masses))
    for count in (*_CANDIDATES, vocab_size):
        drawn, decided = _draw_among(rows, masses, min(count, vocab_size))
        tokens[left] = drawn
        if decided.all():
            break
        rows, masses, left = rows.select(~decided), masses[~decided], left[~decided]
    return tokens


def _draw_among(rows: _Rows, masses: Floats, count: int) -> tuple[Integers, NDArray[np.bool_]]:
    """Return tokens drawn among each row's ``count`` largest logits, and for which rows these were enough to know.

    ``masses`` [R] is the sum of a row's weights where only top_p needs it, else anything. All filters keep prefixes of
    the most-likely-first order, so what is kept is the shortest of the prefixes.
    """
    vocab_size, each = rows.logits.shape[1], np.arange(len(masses))
    values, ids = _largest(rows.logits, count)
    weights = np.exp((values.astype(np.float64) - values[:, :1]) / rows.temperatures[:, None])
    cumulative = weights.cumsum(-1)

    within_top_k = np.where(rows.top_ks > 0, rows.top_ks, vocab_size)
    masses = np.where(rows.top_ks > 0, cumulative[each, np.minimum(within_top_k, count) - 1], masses)
    wanted = np.where(rows.top_ps < 1, rows.top_ps, math.inf) * masses
    within_top_p = (cumulative < wanted[:, None]).sum(-1) + 1
    within_min_p = (weights >= rows.min_ps[:, None]).sum(-1)
    kept = np.minimum(np.minimum(within_top_k, within_top_p), within_min_p).clip(1, count)

    # Beyond the candidates there may be equals of the last one, with a smaller id.
    decided = values[each, kept - 1] > values[:, -1]
    decided &= (rows.top_ks == 0) | (within_top_k <= count)
    ends = cumulative[each, kept - 1]
    places = _places(np.minimum(cumulative, ends[:, None]), rows.uniforms)
    return ids[each, places], decided | (count == vocab_size)


def _largest(logits: Tensor, count: int) -> tuple[NDArray[np.float32], Integers]:
    """Return the values and ids of the largest logits, [R, count], falling, equals by id."""
    if count == logits.shape[1]:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values.numpy(), ids.numpy()
    values, ids = (x.numpy() for x in logits.topk(count))
    if (values[:, 1:] == values[:, :-1]).any():
        order = np.lexsort((ids, -values), axis=-1)
        values, ids = np.take_along_axis(values, order, -1), np.take_along_axis(ids, order, -1)
    return values, ids
