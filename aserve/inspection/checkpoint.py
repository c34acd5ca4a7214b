"""The tensors of a folder's safetensors files, by their headers; and, on request, whether their values are numbers.

Needs no torch: a header is JSON behind its length, and a value is broken if its exponent has all bits set. Pure but for
reading files. The format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from aserve.core.errors import ModelLoadError

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100 * 2**20  # what the format's own library takes
_PIECE_VALUES = 2**22

# name -> (type of the bits, mask of the exponent)
_FLOATS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.uint64, 0x7FF0 << 48),
    "F32": (np.uint32, 0x7F80 << 16),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}


class Tensor(NamedTuple):
    """A tensor's place: ``begin`` and ``end`` are bytes of its file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a folder, in the order of its files."""

    tensors: tuple[Tensor, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(tensor.file for tensor in self.tensors))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.end - tensor.begin for tensor in self.tensors)

    def values_by_dtype(self) -> dict[str, int]:
        """Stored values by the type's name in the files, the most frequent type first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.dtype] += tensor.num_values
        return dict(counts.most_common())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises ModelLoadError if there are no weights in the format, or a file is missing, damaged or cut off."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return Checkpoint(tuple(_read_header(single)))
    if not index.is_file():
        raise ModelLoadError(f"{folder} has no weights in safetensors files")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index.name} cannot be read: {error}") from None
    return Checkpoint(tuple(tensor for name in names for tensor in _read_header(folder / Path(name).name)))


def _read_header(path: Path) -> Iterator[Tensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(size, _MOST_HEADER_BYTES):
                raise ModelLoadError(f"{path.name} is damaged: its header cannot have {length} bytes")
            header = cast("dict[str, dict[str, Any]]", json.loads(file.read(length)))
        start = _LENGTH_BYTES + length
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield Tensor(name, path, entry["dtype"], tuple(entry["shape"]), start + begin, start + end)
                if start + end > size:
                    raise ModelLoadError(f"{path.name} is not complete: {name} would end behind its last byte")
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path.name} is damaged: {' '.join(str(error).split())}") from None


def broken_tensors(
    tensors: Sequence[Tensor], progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, int]:
    """How many values of each tensor are infinite or no number at all; tensors without such values are left out.

    Types that have no such values by themselves (whole numbers, quantised ones) are not looked at.
    """
    total = sum(tensor.end - tensor.begin for tensor in tensors)
    done, broken = 0, {}
    for tensor in tensors:
        if tensor.dtype in _FLOATS and tensor.num_values:
            kind, exponent = _FLOATS[tensor.dtype]
            bits = np.memmap(tensor.file, dtype=kind, mode="r", offset=tensor.begin, shape=(tensor.num_values,))
            mask = kind(exponent)
            pieces = (bits[i : i + _PIECE_VALUES] for i in range(0, len(bits), _PIECE_VALUES))
            number = sum(int(np.count_nonzero((piece & mask) == mask)) for piece in pieces)
            if number:
                broken[tensor.name] = number
        done += tensor.end - tensor.begin
        progress(done, total)
    return broken
