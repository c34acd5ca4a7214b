"""How to fill the inputs of every operation: from a shape, with numbers that a seed decides. Called by ``cases``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

Shape = Mapping[str, Any]
Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes the tensors of one set of inputs; the same seed gives the same numbers on every device."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)

    def integers(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator).to(self.device)


def make_linear(make: Maker, shape: Shape) -> Inputs:
    tokens, columns = shape["x"]
    return {
        "x": make.normal(tokens, columns + shape.get("gap", 0))[:, :columns],
        "weight": make.normal(shape["rows"], columns) * columns**-0.5,
        "bias": make.normal(shape["rows"]) if shape.get("bias") else None,
    }


def make_grouped_linear(make: Maker, shape: Shape) -> Inputs:
    counts, columns = shape["counts"], shape["columns"]
    ends = [sum(counts[: group + 1]) for group in range(len(counts))]
    return {
        "x": make.normal(sum(counts), columns),
        "weight": make.normal(len(counts), shape["rows"], columns) * columns**-0.5,
        "ends": make.integers(ends),
    }


def make_rms_norm(make: Maker, shape: Shape) -> Inputs:
    *rows, size = shape["x"]
    x = make.normal(*rows, size + shape.get("gap", 0))[..., :size]
    return {"x": x, "weight": make.normal(size, dtype=shape.get("weight")), "eps": 1e-5}


def make_fused_add_rms_norm(make: Maker, shape: Shape) -> Inputs:
    tokens, size = shape["x"]
    return {
        "x": make.normal(tokens, size),
        "residual": make.normal(tokens, size),
        "weight": make.normal(size, dtype=shape.get("weight")),
        "eps": 1e-6,
    }


def _fused_projection(make: Maker, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as they lie in the rows of one projection, or apart if the shape says so."""
    tokens, heads, kv_heads, dim = shape["tokens"], shape["heads"], shape["kv_heads"], shape["dim"]
    if shape.get("apart"):
        return make.normal(tokens, heads, dim), make.normal(tokens, kv_heads, dim), make.normal(tokens, kv_heads, dim)
    qkv = make.normal(tokens, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def make_rotary(make: Maker, shape: Shape) -> Inputs:
    q, k, _ = _fused_projection(make, shape)
    max_position = 97
    angles = make.uniform(max_position, shape.get("rotated", shape["dim"]) // 2) * 6.3
    return {
        "q": q,
        "k": k,
        "positions": make.permutation(max_position).repeat(shape["tokens"] // max_position + 1)[: shape["tokens"]],
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1),
    }


def make_gate_and_up(make: Maker, shape: Shape) -> Inputs:
    tokens, size = shape["x"]
    return {"x": make.normal(tokens, 2 * size + shape.get("gap", 0))[:, : 2 * size]}


def make_store_kv(make: Maker, shape: Shape) -> Inputs:
    _, k, v = _fused_projection(make, shape)
    block_size, num_blocks = shape["block_size"], shape["tokens"] // shape["block_size"] + 3
    cache = (num_blocks, block_size, shape["kv_heads"], shape["dim"])
    slots = make.permutation(num_blocks * block_size)[: shape["tokens"]]
    for token in shape.get("skipped", ()):
        slots[token] = -1
    return {
        "k": k,
        "v": v,
        "k_cache": make.normal(*cache),
        "v_cache": make.normal(*cache),
        "slot_mapping": slots,
    }


def make_rotary_and_store(make: Maker, shape: Shape) -> Inputs:
    inputs = {**make_store_kv(make, shape), **make_rotary(make, shape)}
    inputs["q"], inputs["k"], inputs["v"] = _fused_projection(make, shape)
    if shape.get("norm"):
        weights = {name: make.normal(shape["dim"], dtype=shape.get("weight")) for name in ("q_weight", "k_weight")}
        inputs |= {**weights, "eps": 1e-6}
    return inputs


def make_paged_attention(make: Maker, shape: Shape) -> Inputs:
    query_lens, seq_lens, block_size = shape["query_lens"], shape["seq_lens"], shape["block_size"]
    num_blocks_each = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(num_blocks_each) + 2
    ids = make.permutation(num_blocks) if not shape.get("in_order") else torch.arange(num_blocks, device=make.device)
    block_tables = make.integers([[0] * (max(num_blocks_each) + 1)] * len(seq_lens))
    first = 0
    for row, count in zip(block_tables, num_blocks_each, strict=True):
        row[:count] = ids[first : first + count]
        first += count
    q, _, _ = _fused_projection(make, {**shape, "tokens": sum(query_lens)})
    cache = (num_blocks, block_size, shape["kv_heads"], shape["dim"])
    bounds = [sum(query_lens[:s]) for s in range(len(query_lens) + 1)]
    return {
        "q": q,
        "k_cache": make.normal(*cache),
        "v_cache": make.normal(*cache),
        "block_tables": block_tables,
        "cu_seqlens_q": make.integers(bounds),
        "seq_lens": make.integers(seq_lens),
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "scale": shape["dim"] ** -0.5,
        "window": shape.get("window"),
        "softcap": shape.get("softcap"),
    }


_SETTINGS: Final = (  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.5, 70, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.3, 0, 0.5, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (2.0, 0, 1.0, 0.3),
    (0.8, 40, 0.95, 0.01),
    (1.0, 1, 1.0, 0.0),
    (1e-30, 0, 1.0, 0.0),
    (1.0, 10**6, 0.99, 0.0),
    (0.0, 3, 0.5, 0.5),
)


def make_sample(make: Maker, shape: Shape) -> Inputs:
    rows, vocab = shape["rows"], shape["vocab"]
    settings = [shape["setting"]] * rows if "setting" in shape else [_SETTINGS[i % len(_SETTINGS)] for i in range(rows)]
    temperatures, top_ks, top_ps, min_ps = zip(*settings, strict=True)
    # Logits come from a head of the model's dtype: in bfloat16 many are equal.
    logits = (make.normal(rows, vocab, dtype=torch.float32) * shape.get("spread", 3.0)).to(make.dtype).float()
    if "masked" in shape:
        logits[:, shape["masked"] :] = float("-inf")
    return {
        "logits": logits,
        "temperatures": make.integers(temperatures, torch.float32),
        "top_ks": make.integers(top_ks),
        "top_ps": make.integers(top_ps, torch.float32),
        "min_ps": make.integers(min_ps, torch.float32),
        "uniforms": make.uniform(rows),
    }
