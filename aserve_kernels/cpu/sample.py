"""Sampling on the CPU; the contract is ``kernel_set.Sample``.

Each row takes the cheapest way that its own arguments allow (greedy, unfiltered, filtered), the rows of one way
together. The vocabulary is never sorted: a filtered row looks at its largest logits, 64 at first, and at more only if
its filters reach further. Sums over the vocabulary go by fixed tiles, so that a row's result has no part of its batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 128
_SMALLEST_EXPONENT = -87.0
_CANDIDATES = (64, 1024, 8192)  # how many of the largest logits a filtered row looks at, then all


def sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, uniforms: Tensor
) -> Tensor:
    """Return one token id per row."""
    vocab_size = logits.shape[1]
    top_ks = torch.where(top_ks < vocab_size, top_ks, 0)
    greedy = temperatures == 0
    filtered = (top_ks > 0) | (top_ps < 1) | (min_ps > 0)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    ways = (
        (greedy, _sample_greedy),
        (~greedy & ~filtered, _sample_unfiltered),
        (~greedy & filtered, _sample_filtered),
    )
    everything = _Rows(logits, temperatures, top_ks, top_ps, min_ps, uniforms)
    for belongs, way in ways:
        members = belongs.nonzero().squeeze(1)
        if len(members) == len(logits):
            return way(everything)
        if len(members):
            tokens[members] = way(everything.select(members))
    return tokens


@dataclass(frozen=True, slots=True)
class _Rows:
    """The arguments of some rows; fields as in the contract."""

    logits: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    uniforms: Tensor

    def select(self, index: Tensor) -> _Rows:
        return _Rows(
            self.logits.index_select(0, index),
            self.temperatures[index],
            self.top_ks[index],
            self.top_ps[index],
            self.min_ps[index],
            self.uniforms[index],
        )

    def weights(self) -> Tensor:
        """Return exp((logit - largest logit) / temperature), [R, V] float32: probabilities up to a factor.

        The largest is subtracted before the division: a tiny temperature must not make an infinity. Weights end at the
        smallest normal float32, 1e-38 of the largest: denormal ones make exp 25 times slower, zeros 5 times.
        """
        exponents = self.logits - self.logits.amax(-1, keepdim=True)
        if bool((self.temperatures != 1).any()):
            exponents.div_(self.temperatures.unsqueeze(1))
        return exponents.clamp_(min=_SMALLEST_EXPONENT).exp_()


def _tiled(x: Tensor, fill: float) -> Tensor:
    """Return [R, V] as [R, V / tile, tile], the end filled up."""
    missing = -x.shape[1] % _TILE
    return (F.pad(x, (0, missing), value=fill) if missing else x).view(len(x), -1, _TILE)


def _take(tiles: Tensor, index: Tensor) -> Tensor:
    """Return tile ``index[r]`` of each row r, [R, tile]."""
    return tiles[torch.arange(len(tiles)), index]


def _sample_greedy(rows: _Rows) -> Tensor:
    """Return the first largest. Over a whole row torch's argmax takes 9 times as long as its vectorised amax."""
    tiles = _tiled(rows.logits, -math.inf)
    tile = tiles.amax(-1).argmax(-1)
    return tile * _TILE + _take(tiles, tile).argmax(-1)


def _sample_unfiltered(rows: _Rows) -> Tensor:
    """Draw by id: first the tile in which the cumulative weight passes the uniform, then the place within it."""
    tiles = _tiled(rows.weights(), 0.0)
    cumulative = tiles.sum(-1).double().cumsum(-1)
    # A uniform of 0 must pass over what has no weight but the smallest, such as a masked first token.
    targets = rows.uniforms.double().clamp_(min=1e-12).unsqueeze(1) * cumulative[:, -1:]
    tile = torch.searchsorted(cumulative, targets, right=True).clamp_(max=tiles.shape[1] - 1)  # a NaN comes to the end
    before = F.pad(cumulative, (1, 0)).gather(1, tile)
    share = (targets - before) / (cumulative.gather(1, tile) - before)
    tile = tile.squeeze(1)
    tokens = tile * _TILE + _draw(_take(tiles, tile).double().cumsum(-1), share)
    return tokens.clamp_(max=rows.logits.shape[1] - 1)


def _draw(cumulative: Tensor, share: Tensor) -> Tensor:
    """Return the first place in each row of ``cumulative`` [R, n] that exceeds ``share`` [R, 1] of its end, [R]."""
    place = torch.searchsorted(cumulative, share * cumulative[:, -1:], right=True).squeeze(1)
    last = cumulative.argmax(-1)  # the last with a weight; rounding must not lead beyond it
    return torch.minimum(place, last)


def _sample_filtered(rows: _Rows) -> Tensor:
    masses = torch.full((len(rows.logits),), math.inf, dtype=torch.float64)
    needs_mass = (rows.top_ps < 1).logical_and_(rows.top_ks <= 0).nonzero().squeeze(1)
    if len(needs_mass):
        masses[needs_mass] = _tiled(rows.select(needs_mass).weights(), 0.0).sum(-1).double().sum(-1)
    tokens = torch.empty(len(rows.logits), dtype=torch.int64)
    left = torch.arange(len(tokens))
    for num_candidates in (*_CANDIDATES, rows.logits.shape[1]):
        drawn, decided = _draw_among(rows, masses, min(num_candidates, rows.logits.shape[1]))
        tokens[left] = drawn
        if bool(decided.all()):
            break
        undecided = (~decided).nonzero().squeeze(1)
        rows, masses, left = rows.select(undecided), masses[undecided], left[undecided]
    return tokens


def _draw_among(rows: _Rows, masses: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Return the tokens drawn among each row's largest logits, and for which rows these were enough to know, [R].

    ``masses`` [R] float64 is the sum of a row's weights where top_p needs it, else anything. All filters keep prefixes
    of the most-likely-first order, so the kept are the shortest of the prefixes.
    """
    values, ids = _largest(rows.logits, num_candidates)
    vocab_size = rows.logits.shape[1]
    weights = values.double().sub_(values[:, :1]).div_(rows.temperatures.double().unsqueeze(1)).exp_()
    cumulative = weights.cumsum(-1)
    limited = rows.top_ks.unsqueeze(1) > 0
    limits = torch.where(limited, rows.top_ks.unsqueeze(1), vocab_size).long()
    inside = limits.clamp(max=num_candidates) - 1
    masses = torch.where(limited, cumulative.gather(1, inside), masses.unsqueeze(1))

    wanted = torch.where(rows.top_ps < 1, rows.top_ps.double(), math.inf).unsqueeze(1) * masses
    within_top_p = torch.searchsorted(cumulative, wanted) + 1
    within_min_p = (weights >= rows.min_ps.double().unsqueeze(1)).sum(-1, keepdim=True)
    kept = torch.minimum(torch.minimum(limits, within_top_p), within_min_p).clamp_(1, num_candidates)

    # Beyond the candidates may be equals of the last one with a smaller id.
    last = values.gather(1, kept - 1)
    decided = (last > values[:, -1:]) & (~limited | (limits <= num_candidates))
    share = rows.uniforms.double().unsqueeze(1)
    places = torch.arange(num_candidates)
    drawn = _draw(torch.where(places < kept, cumulative, cumulative.gather(1, kept - 1)), share)
    tokens = ids.gather(1, drawn.unsqueeze(1)).squeeze(1)
    return tokens, decided.squeeze(1) | (num_candidates == vocab_size)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the values and ids of the largest logits, [R, count], falling, equals by id."""
    if count == logits.shape[1]:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(count)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
