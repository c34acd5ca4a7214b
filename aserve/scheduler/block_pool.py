"""KV blocks as ids: who holds each one, which are free and in what order they are reused, and which hold what prefix.

Owns reference counts, the free queue and the prefix index. Knows nothing of sequences, tokens, groups or tensors;
called by ``KVCacheManager`` only. Every operation but ``clear_index`` is O(1), so a pool of a million cached blocks
costs a step no more than one of ten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from aserve.core.step import NO_BLOCK

PrefixKey = bytes
"""Names the content of a block: which tokens came before and in it, and for which group it was computed."""


class BlockPool:
    """``num_blocks`` blocks with ids from 0.

    A block with no holder is free, and may still be indexed by the key of the prefix it ends: it is then reused last,
    in the order in which such blocks became free (least recently used first, as in vLLM's free queue).

    Args:
        on_evict: called with the key and the block when an indexed block is about to be reused for something else.

    Attributes:
        num_revivals: how often a free block got a holder by its key.
        lookup: the block with this content, without taking hold of it.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[PrefixKey, int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._keys: list[PrefixKey | None] = [None] * num_blocks
        self._index: dict[PrefixKey, int] = {}
        self.num_revivals = 0
        self.lookup: Callable[[PrefixKey], int | None] = self._index.get  # a method around it would double its cost
        # ordered, and O(1) at both ends and in the middle, where a deque would need a scan to take out a block
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without a holder, indexed ones included."""
        return len(self._free)

    @property
    def num_indexed(self) -> int:
        """Blocks whose prefix can be found."""
        return len(self._index)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def key(self, block_id: int) -> PrefixKey | None:
        """The key by which the block is indexed."""
        return self._keys[block_id]

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def allocate(self) -> int:
        """Take the free block that is worth least; its prefix entry, if it has one, is dropped. One must be free."""
        assert self._free, "no KV block is free"
        block_id, _ = self._free.popitem(last=False)
        self._ref_counts[block_id] = 1
        key = self._keys[block_id]
        if key is not None:
            self.unpublish(block_id)
            if self._on_evict is not None:
                self._on_evict(key, block_id)
        return block_id

    def num_held(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks have a holder; ``NO_BLOCK`` has none."""
        counts = self._ref_counts
        return sum([counts[block_id] > 0 for block_id in block_ids if block_id != NO_BLOCK])

    def hold(self, block_id: int) -> None:
        """Add a holder to a block that ``lookup`` returned."""
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
            self.num_revivals += 1
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Remove a holder. The last one makes the block free: indexed blocks queue up last, others first."""
        count = self._ref_counts[block_id] - 1
        assert count >= 0, f"block {block_id} released without a holder"
        self._ref_counts[block_id] = count
        if count == 0:
            self._free[block_id] = None
            if self._keys[block_id] is None:
                self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, key: PrefixKey) -> None:
        """Index a full, computed block. A prefix that is indexed already keeps the block it has."""
        if self._index.setdefault(key, block_id) == block_id:
            self._keys[block_id] = key

    def unpublish(self, block_id: int) -> None:
        """Drop a block's prefix entry, if it has one; holders keep the block."""
        key = self._keys[block_id]
        if key is not None:
            del self._index[key]
            self._keys[block_id] = None

    def clear_index(self) -> None:
        """Drop all prefix entries; holders keep their blocks. O(blocks)."""
        self._index.clear()
        self._keys = [None] * self.num_blocks
