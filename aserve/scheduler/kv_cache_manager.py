"""Sequences' hold on KV blocks: prefix match, growth, publication and release.

Sits between the scheduler, which decides, and ``BlockPool``, which counts. Prefix entries are named by a chain of
128-bit BLAKE2b hashes over the bytes of each full block's token ids, the parent's hash included and the request's
``cache_salt`` at the root, so equal hashes mean equal prefixes (Python's ``hash`` collides, and differs by process).
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from aserve.core.capacity import Capacity
from aserve.scheduler.block_pool import BlockPool
from aserve.scheduler.sequence import Sequence

HASH_BYTES = 16


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """The prefix hash of a full block that follows the prefix ``parent``."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def root_hash(cache_salt: bytes) -> bytes:
    """The parent of a sequence's first block."""
    return blake2b(cache_salt, digest_size=HASH_BYTES, person=b"aserve-prefix").digest()


class KVCacheManager:
    """Block tables of sequences over one pool."""

    def __init__(self, capacity: Capacity, *, prefix_cache: bool) -> None:
        self.pool = BlockPool(capacity.num_blocks)
        self.prefix_cache = prefix_cache
        self._block_size = capacity.block_size

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the longest cached prefix of the sequence; nothing is taken hold of.

        The last known token is always left to compute, since its logits are needed.
        """
        if not self.prefix_cache:
            return []
        matched: list[int] = []
        for index in range((len(sequence.token_ids) - 1) // self._block_size):
            block_id = self.pool.lookup(self._hash_at(sequence, index))
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def num_blocks_to_take(self, matched: list[int], num_tokens: int) -> int:
        """Free blocks used up by a sequence of ``num_tokens`` that starts from the ``matched`` prefix."""
        revived = sum(self.pool.ref_count(block_id) == 0 for block_id in matched)
        return self._num_blocks_for(num_tokens) - len(matched) + revived

    def start(self, sequence: Sequence, matched: list[int]) -> None:
        """Give a sequence the prefix that ``match_prefix`` found."""
        for block_id in matched:
            self.pool.hold(block_id)
        sequence.block_table = list(matched)
        sequence.num_computed = len(matched) * self._block_size
        sequence.num_published_blocks = len(matched)

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that the table lacks to cover ``num_tokens`` positions."""
        return self._num_blocks_for(num_tokens) - len(sequence.block_table)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Extend the table to cover ``num_tokens`` positions; the blocks must be free."""
        for _ in range(self.num_missing_blocks(sequence, num_tokens)):
            sequence.block_table.append(self.pool.allocate())

    def publish(self, sequence: Sequence) -> None:
        """Offer the blocks that committed steps have filled to other sequences."""
        num_full = sequence.num_computed // self._block_size
        if not self.prefix_cache or num_full <= sequence.num_published_blocks:
            return
        for index in range(sequence.num_published_blocks, num_full):
            self.pool.publish(sequence.block_table[index], self._hash_at(sequence, index))
        sequence.num_published_blocks = num_full

    def withdraw(self, sequence: Sequence) -> None:
        """Take the blocks that only this sequence holds out of the prefix index: they are not to be trusted.

        Blocks that others hold stay; if those are at fault, the last holder to fail takes them out.
        """
        for block_id in sequence.block_table:
            if self.pool.ref_count(block_id) == 1:
                self.pool.unpublish(block_id)

    def release(self, block_ids: list[int]) -> None:
        """Let go of a table's blocks. Last first, so that the beginnings of prefixes are kept longest."""
        for block_id in reversed(block_ids):
            self.pool.release(block_id)

    def _hash_at(self, sequence: Sequence, index: int) -> bytes:
        hashes = sequence.block_hashes
        size = self._block_size
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else root_hash(sequence.request.cache_salt)
            start = len(hashes) * size
            hashes.append(hash_block(parent, sequence.token_ids[start : start + size]))
        return hashes[index]

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
