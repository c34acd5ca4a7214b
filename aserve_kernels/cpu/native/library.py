"""The compiled library's functions with their C types.

Each function exists twice: ``short`` keeps Python's lock, since a call of some microseconds that let it go would wait
for the event loop's thread to give it back; ``long`` lets it go. Made by ``aserve_kernels.cpu`` once per process and
cache folder; used by the operations.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_char_p, c_double, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from aserve_kernels.cpu.native.build import BuildError, open_library

_log = logging.getLogger(__name__)

_SIGNATURES: Final[tuple[tuple[str, Any, tuple[Any, ...]], ...]] = (
    ("aserve_rms_norm", None, (*(c_void_p,) * 4, *(c_long,) * 7, c_double, c_int, c_int, c_int)),
    ("aserve_rotary", None, (*(c_void_p,) * 4, *(c_long,) * 7, c_int, c_int)),
    ("aserve_gate", None, (*(c_void_p,) * 2, *(c_long,) * 4, c_int, c_int, c_int)),
    ("aserve_store_kv", None, (*(c_void_p,) * 5, *(c_long,) * 4)),
    (
        "aserve_paged_attention",
        c_int,
        (*(c_void_p,) * 7, *(c_long,) * 10, c_double, c_long, c_double, c_int, c_int),
    ),
    ("aserve_use_libgomp", None, (c_void_p,)),
    ("aserve_matmul_name", c_char_p, ()),
)
_MATMUL_SIGNATURES: Final = (
    ("aserve_matmul", None, (*(c_void_p,) * 4, *(c_long,) * 5, c_int, c_int)),
    ("aserve_grid_size", c_long, (c_long, c_long)),
    ("aserve_pack_grid", c_int, (*(c_void_p,) * 2, *(c_long,) * 2, c_int)),
    ("aserve_packed_size", c_long, (c_long, c_long)),
    ("aserve_pack", None, (*(c_void_p,) * 2, *(c_long,) * 2)),
)

KINDS: Final = {torch.float32: 0, torch.bfloat16: 1}
"""The element types that the library computes with, and their numbers in C."""

MOST_DIM: Final = 512
"""Largest head size of its attention: a task's arrays lie on the stack."""


class Library:
    """The functions, typed.

    Attributes:
        short: by name, for calls of some microseconds.
        long: by name, for all others.
        has_libgomp: whether it can run on the threads of torch's OpenMP.
        matmul: the instructions that multiply bfloat16 matrices, "" if the CPU has none that the library knows.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.long: Any = library
        self.short: Any = ctypes.PyDLL(None, handle=library._handle)
        self._declare(_SIGNATURES)
        self.matmul: str = self.long.aserve_matmul_name().decode()
        if self.matmul:
            self._declare(_MATMUL_SIGNATURES)
        self.has_libgomp = self._use_libgomp()

    def _declare(self, signatures: tuple[tuple[str, Any, tuple[Any, ...]], ...]) -> None:
        for name, result, arguments in signatures:
            for functions in (self.long, self.short):
                function = getattr(functions, name)
                function.restype, function.argtypes = result, arguments

    def _use_libgomp(self) -> bool:
        """Hand over the entry of the libgomp that torch has loaded; False if torch's threads are of another kind."""
        entry = _libgomp_entry()
        if entry is not None:
            self.long.aserve_use_libgomp(entry)
        return entry is not None


def _libgomp_entry() -> int | None:
    """Return the address of ``GOMP_parallel`` in the process's only libgomp."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
    if len(paths) != 1:
        return None  # none, or no telling which one is torch's
    try:
        return ctypes.cast(ctypes.CDLL(paths.pop()).GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None


@cache
def load_library(cache_dir: Path | None) -> Library | str:
    """Return the library, or one line on why there is none. Asked once per process, which also logs that line once."""
    try:
        library, _ = open_library(cache_dir)
    except BuildError as error:
        _log.warning("CPU operations run in torch, which is slower: %s", error)
        return str(error)
    return Library(library)
