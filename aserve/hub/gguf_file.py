"""Opens a GGUF file and answers questions about it; the other ``gguf_*`` modules never see the reader itself.

Every way in which a file can be damaged becomes one line. Tensors stay on disk (memory-mapped) until they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from aserve.core.errors import ModelLoadError

Array = np.ndarray[Any, Any]

_CHUNK_VALUES = 4 * 2**20
"""Values that are expanded to float32 at a time: 16 MiB."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor. ``shape`` is in numpy order (rows first), ``kind`` is ggml's name of the quantisation."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    num_bytes: int
    stored: Any

    def values(self) -> Array:
        """All values, float32, in ``shape``."""
        return self._dequantise(self.stored).reshape(self.shape)

    def chunks(self) -> Iterator[Array]:
        """The values in order, a few rows at a time, to keep memory small."""
        num_rows = self.shape[0] if len(self.shape) > 1 else 1
        row_size = int(np.prod(self.shape)) // num_rows
        rows = self.stored.reshape(num_rows, -1)
        step = max(1, _CHUNK_VALUES // row_size)
        for start in range(0, num_rows, step):
            yield self._dequantise(rows[start : start + step])

    def _dequantise(self, stored: Any) -> Array:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            return dequantize(stored, GGMLQuantizationType[self.kind])
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {self.name} is stored as {self.kind}, which cannot be converted"
            ) from error


def _plain_reader(path: Path) -> Any:
    """gguf's reader, on a plain view of its memory map: slicing a ``numpy.memmap`` costs three times as much, and a
    vocabulary takes a million slices."""
    from gguf import GGUFReader

    class PlainReader(GGUFReader):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = mapped.view(np.ndarray)

    return PlainReader(path)


class GgufFile:
    """An open GGUF file.

    Raises:
        ModelLoadError: the file is absent, no GGUF, cut off, or one part of a split model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _plain_reader(path)
            self._fields: Any = reader.fields
            self.tensors = {
                t.name: GgufTensor(
                    path, t.name, tuple(int(n) for n in reversed(t.shape)), t.tensor_type.name, int(t.n_bytes), t.data
                )
                for t in reader.tensors
            }
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # the reader raises ValueError, IndexError, KeyError, OverflowError ...
            raise ModelLoadError(
                f"{path} is no GGUF file, or it is damaged or cut off; download it again ({error})"
            ) from error
        num_parts = self.integer("split.count", 1)
        if num_parts > 1:
            raise ModelLoadError(f"{path} is one of {num_parts} parts; join them first with llama-gguf-split --merge")
        self.architecture = self.text("general.architecture")

    def find(self, key: str) -> Any:
        """A metadata value, None if it is absent; ``{arch}`` in the key stands for the architecture."""
        if "{arch}" in key:
            key = key.format(arch=self.architecture)
        field = self._fields.get(key)
        try:
            return None if field is None else field.contents()
        except Exception as error:
            raise ModelLoadError(f"{self.path} is damaged: {key} cannot be read ({error})") from error

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; a list of equal ones (one per layer) counts as one. Raises ModelLoadError."""
        value = self.find(key)
        if isinstance(value, list):
            each = set(cast(list[Any], value))
            if len(each) > 1:
                raise ModelLoadError(f"{self.path}: {key} differs between layers, which is not supported")
            value = each.pop() if each else None
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._missing(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. Raises ModelLoadError."""
        value = self.find(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._missing(key, value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises ModelLoadError."""
        value = self.find(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self._missing(key, value)
        return value

    def items(self, key: str) -> list[Any]:
        """A list, empty if it is absent. Raises ModelLoadError."""
        value = self.find(key)
        if value is not None and not isinstance(value, list):
            raise self._missing(key, value)
        return cast(list[Any], value or [])

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.find(key)
        return default if value is None else bool(value)

    def _missing(self, key: str, value: Any) -> ModelLoadError:
        key = key.format(arch=getattr(self, "architecture", "{arch}"))
        state = "is missing" if value is None else "has the wrong type"
        return ModelLoadError(f"{self.path}: {key} {state} in its metadata")
