"""Which layers share a block table: layers whose attention sees equally far back.

All groups have the same number of layers (a smaller one is padded), and all draw from one pool of block ids: a block is
``block_size`` tokens of ``layers_per_group`` layers, in whichever group it is held (the idea of vLLM's hybrid cache
manager). So a model keeps its whole context only for the layers that look at it. Knows nothing of tensors or bytes;
used by the runtime, by the sizing of the cache and by the kernels' callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 8
"""Most groups of one layout (more if a model has more kinds of windows): each costs a block table to keep."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one block table.

    Attributes:
        window: positions a query sees, its own included; None: all before it.
        layers: indices of the model's layers, ascending.
    """

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model; layers without a window come first, then wide windows before narrow ones.

    The layer L keeps its keys and values in tensor pair ``index_of(L)`` of ``layers_per_group``, at the blocks of group
    ``group_of(L)``.
    """

    groups: tuple[KVGroup, ...]
    layers_per_group: int

    @classmethod
    def of(cls, sliding_windows: Sequence[int | None]) -> KVLayout:
        """Return the layout for one window per layer.

        The group size keeps the padding of layers without a window smallest, since they hold the whole context, then
        the padding of all, then the number of groups. Of 5 full and 29 windowed layers (Gemma 3 4B) it makes seven
        groups of 5; of 13 and 13 (Gemma 2 2B) two of 13; of full layers alone one group.
        """
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(sliding_windows):
            kinds.setdefault(window, []).append(layer)
        if not kinds:
            raise ValueError("a model has at least one layer")
        order = sorted(kinds, key=lambda window: (window is not None, -(window or 0)))
        size = _group_size({window: len(kinds[window]) for window in order})
        groups = tuple(
            KVGroup(window, tuple(kinds[window][start : start + size]))
            for window in order
            for start in range(0, len(kinds[window]), size)
        )
        return cls(groups, size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One window per group, as ``Capacity.windows`` has them."""
        return tuple(group.window for group in self.groups)

    def group_of(self, layer: int) -> int:
        """The index of the group whose block table the layer uses."""
        return self._place(layer)[0]

    def index_of(self, layer: int) -> int:
        """The index of the tensor pair that the layer uses."""
        return self._place(layer)[1]

    def _place(self, layer: int) -> tuple[int, int]:
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number, group.layers.index(layer)
        raise IndexError(f"no layer {layer} in this layout")


def _group_size(num_layers: dict[int | None, int]) -> int:
    limit = max(MAX_GROUPS, len(num_layers))

    def padded(count: int, size: int) -> int:
        return -(-count // size) * size

    costs: list[tuple[int, int, int, int]] = []
    for size in range(1, max(num_layers.values()) + 1):
        total = sum(padded(count, size) for count in num_layers.values())
        if total // size <= limit:
            costs.append((padded(num_layers.get(None, 0), size), total, total // size, size))
    return min(costs)[-1]
