"""Inputs for every operation: odd shapes for tests, shapes of real models for the benchmark, and how to fill them.

Tests and the benchmark both take their inputs from here, so a shape that was ever slow or wrong stays in both. Knows
the contracts in ``kernel_set`` and no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from aserve_kernels import case_inputs
from aserve_kernels.case_inputs import Inputs, Maker, Shape


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
        case_inputs.make_linear,
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
        case_inputs.make_grouped_linear,
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
        case_inputs.make_rms_norm,
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
        case_inputs.make_fused_add_rms_norm,
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
        case_inputs.make_rotary,
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
        case_inputs.make_gate_and_up,
        (),
        (),
        _GATED_SHAPES,
        tuple({"x": (tokens, size)} for size in (1536, 18944) for tokens in (1, 8, 32, 512)),
    ),
    Operation(
        "gelu_tanh_and_mul",
        case_inputs.make_gate_and_up,
        (),
        (),
        _GATED_SHAPES,
        tuple({"x": (tokens, size)} for size in (2048, 9216) for tokens in (1, 8, 32, 512)),
    ),
    Operation(
        "store_kv",
        case_inputs.make_store_kv,
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
        case_inputs.make_rotary_and_store,
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
        case_inputs.make_paged_attention,
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
        case_inputs.make_sample,
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
