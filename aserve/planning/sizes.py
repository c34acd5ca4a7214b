"""Bytes as people read them and as flags take them."""

from __future__ import annotations

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


def show_size(num_bytes: int) -> str:
    """A size in GiB, or in MiB where that is less than one."""
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"


def flag_size(num_bytes: int, *, up: bool = False) -> str:
    """A size as flags take it, whole MiB, or KiB where it is small; rounded down unless ``up``."""
    unit, name = (_MIB, "MiB") if num_bytes >= 64 * _MIB else (_KIB, "KiB")
    return f"{-(-num_bytes // unit) if up else num_bytes // unit}{name}"
