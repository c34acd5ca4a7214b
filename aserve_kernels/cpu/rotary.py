"""Rotary position embedding for the CPU; the contract is ``kernel_set.Rotary``."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate channel pairs (i, i + R / 2) of each head by the angle of its position."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin.index_select(0, positions).view(-1, 1, 2, half).unbind(2)  # each [T, 1, R / 2]
    joined = _joined(q, k)
    for x in (q, k) if joined is None else (joined,):
        pairs = x[..., : 2 * half].unflatten(-1, (2, half))  # [T, heads, 2, R / 2]
        rotated = pairs.float()  # the same memory if x is float32
        first, second = rotated.unbind(2)
        first_sin = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(first_sin)
        if rotated.dtype != x.dtype:
            pairs.copy_(rotated)


def _joined(q: Tensor, k: Tensor) -> Tensor | None:
    """Return q and k as one tensor [T, Hq + Hkv, D] if they are neighbours in the rows of a fused projection."""
    num_tokens, num_heads, head_dim = q.shape
    follows = k.data_ptr() == q.data_ptr() + num_heads * head_dim * q.element_size()
    if not follows or k.untyped_storage().data_ptr() != q.untyped_storage().data_ptr():
        return None
    if k.stride() != q.stride() or q.stride(0) < (num_heads + k.shape[1]) * head_dim:
        return None
    return torch.as_strided(q, (num_tokens, num_heads + k.shape[1], head_dim), q.stride())
