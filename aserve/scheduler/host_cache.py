"""Slots of host memory for prefix blocks that had to leave the KV cache, and the copies that a plan needs for them.

Decides only: which slot holds what, and what is to be copied with the next plan. The executor performs a plan's saves,
then its restores, then its rows, after all of the plan before; so a slot may be read in the plan that writes it, but
not be written in a plan that reads what it held before. Hence two rules: a slot that the next plan restores from is
not given away until that plan is made, and the next plan writes no slot twice. Called by ``KVCacheManager`` only.
"""

from __future__ import annotations

from collections import OrderedDict

from aserve.core.step import BlockCopy
from aserve.scheduler.block_pool import PrefixKey


class HostCache:
    """``num_slots`` slots with ids from 0, reused least recently used first; with no slots nothing is ever kept.

    A prefix stays here when it is restored, so that the block which it was restored to needs no copy when it leaves
    the KV cache again.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[PrefixKey, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._saves: dict[int, int] = {}  # slot -> block, of the plan being made
        self._restores: dict[int, int] = {}  # block -> slot, of the plan being made
        self._pinned: set[int] = set()

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._slots

    def save(self, key: PrefixKey, block_id: int) -> None:
        """Keep what a block holds that is about to be overwritten, unless the next plan needs every slot already."""
        self._restores.pop(block_id, None)  # if it was to receive it, the slot has it still
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        slot = self._take_slot()
        if slot is not None:
            self._slots[key] = slot
            self._saves[slot] = block_id  # in place of the save that the slot was to receive, if there was one

    def pin(self, key: PrefixKey) -> None:
        """Keep what is to be restored from being replaced until the plan is made."""
        self._slots.move_to_end(key)
        self._pinned.add(self._slots[key])

    def restore(self, key: PrefixKey, block_id: int) -> None:
        """Have a block filled with what was kept; ``key`` has been pinned."""
        slot = self._slots[key]
        assert slot in self._pinned, "a restore from a slot that may be reused"
        self._restores[block_id] = slot

    def forget(self, key: PrefixKey) -> None:
        """Drop an entry, if there is one."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._saves.pop(slot, None)
            self._free.append(slot)

    def clear(self) -> None:
        """Drop every entry, and the saves that no plan has taken yet. Between plans nothing is restored or pinned."""
        for key in list(self._slots):
            self.forget(key)

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """The saves and restores of the plan that is being made. What is asked for from now on goes with the next."""
        if not self._saves and not self._restores:
            return (), ()
        saves = tuple(BlockCopy(block_id, slot) for slot, block_id in self._saves.items())
        restores = tuple(BlockCopy(block_id, slot) for block_id, slot in self._restores.items())
        self._saves.clear()
        self._restores.clear()
        self._pinned.clear()
        return saves, restores

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._slots:
            return None
        key, slot = next(iter(self._slots.items()))
        if slot in self._pinned:
            return None  # pinning moves to the end, so behind this one are only pinned slots and this plan's saves
        del self._slots[key]
        return slot
