"""Inputs for every operation: odd shapes for tests, shapes of real models for the benchmark, and how to fill them.

Tests and the benchmark both take their inputs from here, so a shape that was ever slow or wrong stays in both. Knows
the contracts in ``kernel_set`` and no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a kernel set: how to make its inputs, and what to compare."""

    name: str
    make: Callable[[Maker, Shape], Inputs]
    written: tuple[str, ...]
    """Arguments that a call may overwrite."""
    compared: tuple[str, ...]
    """Arguments whose contents afterwards are a result, besides what is returned."""
    shapes: tuple[Shape, ...]
    """Odd shapes, small enough for Triton's interpreter."""
    bench_shapes: tuple[Shape, ...]
    """Shapes of real models."""


def make_inputs(
    operation: Operation, shape: Shape, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> Inputs:
    """Return keyword arguments for a call of the operation."""
    return operation.make(Maker(dtype, torch.device(device), torch.Generator().manual_seed(seed)), shape)


def _make_linear(make: Maker, shape: Shape) -> Inputs:
    tokens, columns = shape["x"]
    return {
        "x": make.normal(tokens, columns + shape.get("gap", 0))[:, :columns],
        "weight": make.normal(shape["rows"], columns) * columns**-0.5,
        "bias": make.normal(shape["rows"]) if shape.get("bias") else None,
    }


def _make_grouped_linear(make: Maker, shape: Shape) -> Inputs:
    counts, columns = shape["counts"], shape["columns"]
    ends = [sum(counts[: group + 1]) for group in range(len(counts))]
    return {
        "x": make.normal(sum(counts), columns),
        "weight": make.normal(len(counts), shape["rows"], columns) * columns**-0.5,
        "ends": make.integers(ends),
    }


def _make_rms_norm(make: Maker, shape: Shape) -> Inputs:
    *rows, size = shape["x"]
    x = make.normal(*rows, size + shape.get("gap", 0))[..., :size]
    return {"x": x, "weight": make.normal(size, dtype=shape.get("weight")), "eps": 1e-5}


def _make_fused_add_rms_norm(make: Maker, shape: Shape) -> Inputs:
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


def _make_rotary(make: Maker, shape: Shape) -> Inputs:
    q, k, _ = _fused_projection(make, shape)
    max_position = 97
    angles = make.uniform(max_position, shape.get("rotated", shape["dim"]) // 2) * 6.3
    return {
        "q": q,
        "k": k,
        "positions": make.permutation(max_position).repeat(shape["tokens"] // max_position + 1)[: shape["tokens"]],
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1),
    }


def _make_gate_and_up(make: Maker, shape: Shape) -> Inputs:
    tokens, size = shape["x"]
    return {"x": make.normal(tokens, 2 * size + shape.get("gap", 0))[:, : 2 * size]}


def _make_store_kv(make: Maker, shape: Shape) -> Inputs:
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


def _make_rotary_and_store(make: Maker, shape: Shape) -> Inputs:
    inputs = {**_make_store_kv(make, shape), **_make_rotary(make, shape)}
    inputs["q"], inputs["k"], inputs["v"] = _fused_projection(make, shape)
    if shape.get("norm"):
        weights = {name: make.normal(shape["dim"], dtype=shape.get("weight")) for name in ("q_weight", "k_weight")}
        inputs |= {**weights, "eps": 1e-6}
    return inputs


def _make_paged_attention(make: Maker, shape: Shape) -> Inputs:
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


def _make_sample(make: Maker, shape: Shape) -> Inputs:
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


_SMOL = MappingProxyType({"heads": 9, "kv_heads": 3, "dim": 64})
_GEMMA = MappingProxyType({"heads": 4, "kv_heads": 1, "dim": 256})
_QWEN = MappingProxyType({"heads": 28, "kv_heads": 4, "dim": 128})
_ODD = MappingProxyType({"heads": 6, "kv_heads": 2, "dim": 20})


def _decode(sizes: Shape, seq_lens: list[int], **more: Any) -> Shape:
    return {**sizes, "query_lens": [1] * len(seq_lens), "seq_lens": seq_lens, "block_size": 16, **more}


def _mixed(sizes: Shape, query_lens: list[int], seq_lens: list[int], **more: Any) -> Shape:
    return {**sizes, "query_lens": query_lens, "seq_lens": seq_lens, "block_size": 16, **more}


_ATTENTION_SHAPES: Final[tuple[Shape, ...]] = (
    _decode(_ODD, [1], block_size=1),
    _decode(_SMOL, [37]),
    _decode(_ODD, [33, 1, 70, 64], block_size=8),
    _decode(_ODD, [5, 0, 90], block_size=24, window=7),
    _mixed(_ODD, [19], [19], block_size=8),
    _mixed(_SMOL, [7], [40], in_order=True),
    _mixed(_ODD, [1, 23, 1, 5], [50, 23, 3, 41], block_size=24),
    _mixed(_ODD, [30, 1, 9], [30, 61, 77], block_size=8, window=10),
    _mixed({"heads": 7, "kv_heads": 1, "dim": 16, "apart": True}, [25, 1], [25, 40], block_size=1),
    _mixed({"heads": 2, "kv_heads": 2, "dim": 32}, [0, 3, 1], [4, 3, 18], in_order=True),
    _decode(_ODD, [33, 1, 70], block_size=8, window=9, softcap=0.8),
    _mixed(_ODD, [1, 23, 30], [50, 23, 41], block_size=24, softcap=1.5),
    _decode(_ODD, [33, 0, 140], block_size=64, window=50),
    _mixed(_ODD, [1, 70, 90, 3], [150, 70, 130, 129], block_size=128),
)

_GATED_SHAPES: Final[tuple[Shape, ...]] = ({"x": (1, 1536)}, {"x": (5, 33), "gap": 3}, {"x": (3, 1030)})
_WIDE_WEIGHT: Final = {"weight": torch.float32}  # of Gemma's norms

_OPERATIONS = (
    Operation(
        "linear",
        _make_linear,
        (),
        (),
        (
            {"x": (1, 576), "rows": 40},
            {"x": (1, 1100), "rows": 9, "bias": True},
            {"x": (2, 70), "rows": 5, "gap": 3},
            {"x": (3, 520), "rows": 10, "bias": True, "gap": 1},
            {"x": (4, 33), "rows": 1},
            {"x": (7, 64), "rows": 12, "bias": True},
            {"x": (0, 64), "rows": 12},
        ),
        tuple(
            {"x": (tokens, columns), "rows": rows}
            for rows, columns in ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
            for tokens in (1, 4, 32)
        ),
    ),
    Operation(
        "grouped_linear",
        _make_grouped_linear,
        (),
        (),
        (
            {"counts": (3, 0, 5, 1), "columns": 70, "rows": 9},
            {"counts": (0, 0, 1, 0, 0), "columns": 33, "rows": 130},
            {"counts": (40, 0, 17), "columns": 20, "rows": 5},
            {"counts": (150, 1), "columns": 64, "rows": 64},
            {"counts": (0, 0), "columns": 16, "rows": 4},
        ),
        tuple(
            {"counts": (each,) * 128, "columns": columns, "rows": rows}
            for columns, rows in ((2048, 1536), (768, 2048))
            for each in (1, 16, 512)
        ),
    ),
    Operation(
        "rms_norm",
        _make_rms_norm,
        (),
        (),
        (
            {"x": (1, 576)},
            {"x": (5, 63), "gap": 5},
            {"x": (3, 4, 64), "gap": 0},
            {"x": (2, 3, 16), "gap": 2},
            {"x": (1, 640), **_WIDE_WEIGHT},
            {"x": (3, 4, 32), "gap": 3, **_WIDE_WEIGHT},
        ),
        tuple({"x": (tokens, size)} for size in (576, 3584) for tokens in (1, 8, 32, 512)),
    ),
    Operation(
        "fused_add_rms_norm",
        _make_fused_add_rms_norm,
        ("x", "residual"),
        (),
        (
            {"x": (1, 576)},
            {"x": (7, 33)},
            {"x": (2, 1025)},
            {"x": (1, 640), **_WIDE_WEIGHT},
            {"x": (3, 33), **_WIDE_WEIGHT},
        ),
        tuple({"x": (tokens, size)} for size in (576, 3584) for tokens in (1, 8, 32, 512)),
    ),
    Operation(
        "rotary",
        _make_rotary,
        ("q", "k"),
        ("q", "k"),
        (
            {**_SMOL, "tokens": 1},
            {**_ODD, "tokens": 5},
            {**_ODD, "tokens": 3, "rotated": 8},
            {**_ODD, "tokens": 4, "apart": True},
            {"heads": 17, "kv_heads": 1, "dim": 16, "tokens": 2, "rotated": 16},
        ),
        tuple({**sizes, "tokens": tokens} for sizes in (_SMOL, _QWEN) for tokens in (1, 8, 32, 512)),
    ),
    Operation(
        "silu_and_mul",
        _make_gate_and_up,
        (),
        (),
        _GATED_SHAPES,
        tuple({"x": (tokens, size)} for size in (1536, 18944) for tokens in (1, 8, 32, 512)),
    ),
    Operation(
        "gelu_tanh_and_mul",
        _make_gate_and_up,
        (),
        (),
        _GATED_SHAPES,
        tuple({"x": (tokens, size)} for size in (2048, 9216) for tokens in (1, 8, 32, 512)),
    ),
    Operation(
        "store_kv",
        _make_store_kv,
        ("k_cache", "v_cache"),
        ("k_cache", "v_cache"),
        (
            {**_SMOL, "tokens": 1, "block_size": 16},
            {**_ODD, "tokens": 9, "block_size": 1, "skipped": (0, 4)},
            {**_ODD, "tokens": 7, "block_size": 24, "skipped": range(7)},
            {**_ODD, "tokens": 11, "block_size": 8, "apart": True},
        ),
        tuple({**sizes, "tokens": n, "block_size": 16} for sizes in (_SMOL, _QWEN) for n in (1, 8, 32, 512)),
    ),
    Operation(
        "rotary_and_store",
        _make_rotary_and_store,
        ("q", "k", "k_cache", "v_cache"),
        ("q", "k_cache", "v_cache"),
        (
            {**_SMOL, "tokens": 1, "block_size": 16},
            {**_ODD, "tokens": 5, "block_size": 8, "norm": True, "skipped": (1,)},
            {**_ODD, "tokens": 3, "block_size": 1, "rotated": 8, "norm": True},
            {**_ODD, "tokens": 2, "block_size": 8, "norm": True, **_WIDE_WEIGHT},
            {**_ODD, "tokens": 4, "block_size": 24, "apart": True, "rotated": 16},
            {"heads": 17, "kv_heads": 1, "dim": 16, "tokens": 2, "block_size": 8, "norm": True, "apart": True},
        ),
        tuple({**sizes, "tokens": n, "block_size": 16} for sizes in (_SMOL, _QWEN) for n in (1, 8, 32, 512)),
    ),
    Operation(
        "paged_attention",
        _make_paged_attention,
        (),
        (),
        _ATTENTION_SHAPES,
        (
            *(_decode(sizes, [160] * n) for sizes in (_SMOL, _QWEN) for n in (1, 8, 32)),
            _decode(_SMOL, list(range(40, 680, 20))),
            _decode(_SMOL, [2000]),
            _decode(_SMOL, [2000], in_order=True),
            _mixed(_SMOL, [512], [512]),
            _mixed(_SMOL, [256], [1500]),
            _mixed(_SMOL, [128] + [1] * 8, [128] + [160] * 8),
            _decode(_GEMMA, [2000] * 8, window=512),
            _decode(_GEMMA, [2000] * 8, softcap=50.0),
            _mixed(_GEMMA, [512], [1500], window=512),
        ),
    ),
    Operation(
        "sample",
        _make_sample,
        (),
        (),
        (
            {"rows": 15, "vocab": 300},
            {"rows": 15, "vocab": 7, "spread": 1.0},
            {"rows": 15, "vocab": 1500, "masked": 700},
            {"rows": 15, "vocab": 128, "spread": 0.01},
        ),
        tuple(
            {"rows": n, "vocab": 49152, "spread": 6.0, "setting": s}
            for s in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.2, 0, 0.9, 0.0), (1.0, 50, 1.0, 0.0))
            for n in (1, 8, 32)
        ),
    ),
)

OPERATIONS: Final = MappingProxyType({operation.name: operation for operation in _OPERATIONS})
"""Every operation by its name in KernelSet."""
