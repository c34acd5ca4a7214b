"""Brings the rows of stored query, key and value projections into the order that attention computes in.

Kernels rotate channels i and i + half of a head. A checkpoint whose model rotates channels 2i and 2i + 1 gives the same
scores once the rows of queries and keys are reordered alike, so that costs nothing but a copy while loading.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aserve.core.model_spec import ModelSpec


def projection_orders(spec: ModelSpec) -> Mapping[str, Tensor]:
    """Return, by the name of a shard, which stored rows become rows 0, 1, 2 ...; absent where they stay."""
    orders: dict[str, Tensor] = {}
    if spec.rope.interleaved:
        channels = head_channels(spec)
        orders = {"q": _by_head(channels, spec.num_heads), "k": _by_head(channels, spec.num_kv_heads)}
    if spec.grouped_qkv:
        orders["q+k+v"] = _ungrouped(spec)
    return orders


def head_channels(spec: ModelSpec) -> Tensor:
    """Return which channel of a head as stored becomes channel 0, 1, 2 ...: [head_dim] int64."""
    channels = torch.arange(spec.head_dim, device="cpu")
    rotary_dim = spec.rope.rotary_dim
    if not spec.rope.interleaved:
        return channels
    return torch.cat((channels[:rotary_dim:2], channels[1:rotary_dim:2], channels[rotary_dim:]))


def _by_head(channels: Tensor, num_heads: int) -> Tensor:
    starts = torch.arange(num_heads, device="cpu") * len(channels)
    return (starts[:, None] + channels).flatten()


def _ungrouped(spec: ModelSpec) -> Tensor:
    """All queries, then keys, then values, of rows stored as the queries, key and value of each KV head in turn."""
    rows = torch.arange((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, device="cpu")
    groups = rows.view(spec.num_kv_heads, -1, spec.head_dim)
    return torch.cat((groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()))
