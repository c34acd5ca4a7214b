"""Sampling in plain torch, one row at a time in float64; the contract is ``kernel_set.Sample``."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, uniforms: Tensor
) -> Tensor:
    """Return one token id per row."""
    arguments = zip(
        logits,
        temperatures.tolist(),
        top_ks.tolist(),
        top_ps.tolist(),
        min_ps.tolist(),
        uniforms.tolist(),
        strict=True,
    )
    return torch.stack([_sample_row(*row) for row in arguments])


def _sample_row(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    # The largest logit is subtracted before the division: a tiny temperature must not make an infinity.
    probs = torch.softmax((logits.double() - logits.max()) / temperature, dim=-1)
    vocab_size = len(probs)
    if not (0 < top_k < vocab_size or top_p < 1 or min_p > 0):
        return _draw(probs, uniform)

    ids = torch.sort(logits, descending=True, stable=True).indices  # stable: equal logits stay in the order of ids
    probs = probs[ids]
    if 0 < top_k < vocab_size:
        probs = probs[:top_k]
    if top_p < 1:
        cumulative = probs.cumsum(0)
        reached = torch.searchsorted(cumulative, top_p * cumulative[-1])  # how many prefixes fall short
        probs = probs[: int(reached) + 1]
    probs = probs[probs >= min_p * probs[0]]
    return ids[_draw(probs, uniform)]


def _draw(probs: Tensor, uniform: float) -> Tensor:
    """Return the first index whose cumulative share of ``probs`` exceeds ``uniform``."""
    cumulative = probs.cumsum(0)
    return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
