"""The ranks that share one model's weights, as layers see them.

Layers ask a group for their slice and for the sum or concatenation of partial results. ``SoloGroup`` is the group of
one rank, so layers are built and tested without processes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TPGroup(Protocol):
    """A tensor-parallel group. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process's place, in ``[0, size)``."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks, at least 1."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``; may overwrite ``x``."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' ``x`` [..., n], joined by rank along the last dimension: [..., size * n]."""
        ...


class SoloGroup:
    """The group of one rank; nothing is communicated."""

    __slots__ = ()

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x
