"""What a checkpoint's ``quantization_config`` says about the bytes of its weights.

Reads that one object of ``config.json`` and nothing else of it; knows names and sizes, not how weights are packed or
multiplied. Which of these formats a server can load is the matter of ``aserve.quantization``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from aserve.core.errors import ModelLoadError

LM_HEAD = "lm_head"
_METHODS = "awq, gptq, fp8, compressed-tensors, mxfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How the matrices of the linear layers are stored. Embeddings and norms always keep the model's dtype.

    Attributes:
        method: as the config names it.
        bits: of one weight.
        group: weights of a row that share a scale; None: a whole row, or the block.
        block: (rows, columns) that share a scale, instead of parts of rows.
        scale_bits, zero_bits: of the scale and the zero point of each group or block; 0: none.
        column_bytes: for each column of a matrix, beside that (GPTQ's group indices).
        skipped: patterns of layers that keep the model's dtype.
    """

    method: str
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    scale_bits: int = 16
    zero_bits: int = 0
    column_bytes: int = 0
    skipped: tuple[str, ...] = (LM_HEAD,)

    def covers(self, name: str) -> bool:
        """Whether the linear layer of this name (``model.layers.0.mlp.up_proj``) is stored in this format."""
        return not any(_matches(pattern, name) for pattern in self.skipped)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a [rows, columns] matrix with its scales."""
        if self.block is not None:
            num_scales = _ceil(rows, self.block[0]) * _ceil(columns, self.block[1])
        else:
            num_scales = rows * _ceil(columns, self.group or columns)
        bits = rows * columns * self.bits + num_scales * (self.scale_bits + self.zero_bits)
        return _ceil(bits, 8) + columns * self.column_bytes

    def describe(self) -> str:
        """One phrase for people: ``awq, 4 bits, groups of 128``."""
        parts = f", blocks of {self.block[0]}x{self.block[1]}" if self.block else ""
        parts += f", groups of {self.group}" if self.group else ""
        return f"{self.method}, {self.bits} bits{parts}"


def read_weight_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of a parsed ``config.json``; None for plain weights.

    Raises ModelLoadError for a method whose sizes are not known, or a value that makes no sense.
    """
    found: object = config.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ModelLoadError(f"config.json: quantization_config must be an object, not {found!r}")
    settings = cast("dict[str, Any]", found)
    match settings.get("quant_method"):
        case "awq":
            bits = _integer(settings, "bits", 4)
            zero_bits = bits if settings.get("zero_point", True) else 0
            group = _integer(settings, "group_size", 128)
            return WeightFormat(
                method="awq", bits=bits, group=group, zero_bits=zero_bits, skipped=(LM_HEAD, *_skipped(settings))
            )
        case "gptq":
            return _gptq(settings)
        case "fp8":
            return _fp8(settings)
        case "mxfp4":
            return WeightFormat(method="mxfp4", bits=4, group=32, scale_bits=8, skipped=(LM_HEAD, *_skipped(settings)))
        case "compressed-tensors":
            return _compressed_tensors(settings)
        case method:
            raise ModelLoadError(
                f"the model's weights are quantized with {method!r}, whose sizes are not known; known: {_METHODS}"
            )


def _gptq(settings: Mapping[str, Any]) -> WeightFormat:
    bits, group = _integer(settings, "bits", 4), settings.get("group_size", 128)
    return WeightFormat(
        method="gptq",
        bits=bits,
        group=None if group == -1 else _integer(settings, "group_size", 128),
        zero_bits=bits,
        column_bytes=4,
        skipped=(*(() if settings.get("lm_head") is True else (LM_HEAD,)), *_skipped(settings)),
    )


def _fp8(settings: Mapping[str, Any]) -> WeightFormat:
    block: object = settings.get("weight_block_size")
    shape: tuple[int, int] | None = None
    if block is not None:
        match block:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                shape = rows, columns
            case _:
                raise ModelLoadError(f"config.json: weight_block_size must be two sizes, not {block!r}")
    return WeightFormat(method="fp8", bits=8, block=shape, scale_bits=32, skipped=(LM_HEAD, *_skipped(settings)))


def _compressed_tensors(settings: Mapping[str, Any]) -> WeightFormat:
    groups: object = settings.get("config_groups")
    weights: list[dict[str, Any]] = []
    for entry in cast("dict[str, Any]", groups).values() if isinstance(groups, dict) else ():
        described: object = cast("dict[str, Any]", entry).get("weights") if isinstance(entry, dict) else None
        if isinstance(described, dict):
            weights.append(cast("dict[str, Any]", described))
    if len(weights) != 1:
        raise ModelLoadError(
            f"config.json: config_groups of compressed-tensors must describe one kind of weights, not {len(weights)}"
        )
    only = weights[0]
    bits = _integer(only, "num_bits", 8)
    return WeightFormat(
        method="compressed-tensors",
        bits=bits,
        group=_integer(only, "group_size", 128) if only.get("strategy") == "group" else None,
        zero_bits=0 if only.get("symmetric", True) else bits,
        skipped=_skipped(settings),
    )


def _skipped(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns of layers left alone, under the names that the libraries give the list."""
    patterns: list[str] = []
    for name in ("modules_to_not_convert", "ignored_layers", "ignore"):
        value: object = settings.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[object]", value)):
            raise ModelLoadError(f"config.json: {name} must be a list of layer names, not {value!r}")
        patterns += cast("list[str]", value)
    return tuple(patterns)


def _matches(pattern: str, name: str) -> bool:
    """A pattern is a regular expression after ``re:``, else a name or a part of one between dots."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise ModelLoadError(f"config.json: {pattern!r} is no regular expression: {error}") from None
    return f".{pattern.strip('.')}." in f".{name}."


def _integer(settings: Mapping[str, Any], name: str, default: int) -> int:
    value: object = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config.json: quantization_config.{name} must be a positive whole number, not {value!r}")
    return value


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
