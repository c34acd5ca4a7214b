"""Writes a safetensors file weight by weight, so that a model never has to fit into memory.

The format: 8 bytes with the header's length (little endian), the header as JSON, the weights' bytes in order
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple


class Weight(NamedTuple):
    """A bfloat16 weight; ``chunks`` gives its bytes in order."""

    name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes]]


def write_safetensors(path: Path, weights: Sequence[Weight], *, written: Callable[[Weight], None]) -> None:
    """Write the weights in the order given and call ``written`` after each. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + 2 * prod(weight.shape)
        header[weight.name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # the weights begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for weight in weights:
            for chunk in weight.chunks():
                file.write(chunk)
            written(weight)
        size = file.tell()
    if size != 8 + len(raw) + end:
        raise ValueError(f"{path} has {size} bytes instead of {8 + len(raw) + end}")
