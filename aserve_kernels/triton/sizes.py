"""Sizes of Triton programs, in plain integers; used by every launcher of this package."""

from __future__ import annotations


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is at least ``size``, which is positive."""
    return 1 << (size - 1).bit_length()


def warps_for(block: int) -> int:
    """Return how many warps a program gets that holds ``block`` elements of a row: 16 elements a thread."""
    return min(16, max(1, block // 512))
