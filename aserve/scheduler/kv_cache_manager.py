"""Sequences' hold on KV blocks: prefix match, growth, what falls behind a window, publication and release.

Sits between the scheduler, which decides, ``BlockPool``, which counts, and ``HostCache``, which keeps what the pool
has to give away. A sequence has one block table per KV group, all of one length; a window group's table has
``NO_BLOCK`` where nothing is read any more. Which prefixes are cached is the matter of ``PrefixMatcher``.
"""

from __future__ import annotations

from aserve.core.capacity import Capacity
from aserve.core.step import NO_BLOCK, BlockCopy
from aserve.scheduler.block_pool import BlockPool
from aserve.scheduler.host_cache import HostCache
from aserve.scheduler.prefix_key import extend_hashes, hash_at
from aserve.scheduler.prefix_match import PrefixMatch, PrefixMatcher
from aserve.scheduler.sequence import NEVER, Sequence


class KVCacheManager:
    """Block tables of sequences over one pool.

    Attributes:
        prefixes: finds cached prefixes.
        num_host_hits: sequences whose prefix was in part restored from host memory.
        num_restored_tokens: tokens of those prefixes that at least one group restored.
        num_withdrawn_shared: blocks that left the prefix index while several sequences held them.
    """

    def __init__(self, capacity: Capacity, *, prefix_cache: bool) -> None:
        self.host = HostCache(capacity.num_host_blocks if prefix_cache else 0)
        self.pool = BlockPool(capacity.num_blocks, self.host.save if self.host.num_slots else None)
        self.prefixes = PrefixMatcher(capacity, self.pool, self.host)
        self.prefix_cache = prefix_cache
        self.num_host_hits = 0
        self.num_restored_tokens = 0
        self.num_withdrawn_shared = 0
        self._capacity = capacity
        self._block_size = capacity.block_size
        self._num_groups = capacity.num_groups
        # an index entry without its group would let one group read what another has computed
        self._groups = [(number, bytes([number]), window) for number, window in enumerate(capacity.windows)]
        self._windowed = [(number, tag, window) for number, tag, window in self._groups if window is not None]
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Counts resets; what was computed in another epoch is never published."""
        return self._epoch

    # -- finding a prefix --------------------------------------------------------------------------------------------

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Find the longest cached prefix of the sequence; nothing is taken hold of."""
        if not self.prefix_cache:
            return PrefixMatch(0, [[] for _ in self._groups])
        return self.prefixes.match(sequence)

    def hashes_filled_by(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Prefix hashes of the blocks that will be published once so many more tokens are computed."""
        if not self.prefix_cache or sequence.cache_epoch != self._epoch:
            return []
        first, end = (n // self._block_size for n in (sequence.num_scheduled, sequence.num_scheduled + num_tokens))
        extend_hashes(sequence, end, self._block_size)
        return sequence.block_hashes[first:end]

    # -- taking hold -------------------------------------------------------------------------------------------------

    def num_blocks_to_take(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks used up by a sequence of ``num_tokens`` that starts from the matched prefix."""
        return self._capacity.num_blocks_for(num_tokens) - sum(map(self.pool.num_held, match.tables))

    def start(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence the prefix that ``match_prefix`` found."""
        for table in match.tables:
            for block_id in table:
                if block_id != NO_BLOCK:
                    self.pool.hold(block_id)
        sequence.block_tables = match.tables
        if match.on_host:
            self._restore(match)
        num_tokens = match.num_blocks * self._block_size
        sequence.num_covered = num_tokens
        sequence.num_computed = num_tokens
        sequence.num_published_blocks = match.num_blocks
        sequence.cache_epoch = self._epoch
        sequence.first_blocks = [self._capacity.first_block(window, num_tokens) for _, _, window in self._groups]
        sequence.next_drop = self._next_drop(sequence)

    def _restore(self, match: PrefixMatch) -> None:
        """Bring what is on the host back into blocks. These can be shared at once: whoever reads them runs later."""
        for _, _, key in match.on_host:  # all, before the first allocation can evict one of them
            self.host.pin(key)
        for group, index, key in match.on_host:
            block_id = self.pool.allocate()
            self.host.restore(key, block_id)
            self.pool.publish(block_id, key)
            self.prefixes.note_published(key)
            match.tables[group][index] = block_id
        self.num_host_hits += 1
        self.num_restored_tokens += len({index for _, index, _ in match.on_host}) * self._block_size

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that the tables lack to cover ``num_tokens`` positions."""
        return -(-(num_tokens - sequence.num_covered) // self._block_size) * self._num_groups

    def num_promised_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence will hold at this length, beyond those that it holds."""
        num_held = len(sequence.block_tables[0]) * self._num_groups - sum(sequence.first_blocks)
        return max(0, self._capacity.num_blocks_for(num_tokens) - num_held)

    def chunk_that_fits(self, sequence: Sequence, num_tokens: int, num_reserved: int) -> int:
        """The part of a chunk for which unreserved blocks are free; if that is nothing, what one more place takes.

        A sequence is promised what its window touches, not room for a whole chunk beside it, so chunks shrink when
        blocks are short: at worst to the end of the last block, where all that can fall behind a window has. Without
        windows all of a prompt is promised, and its chunks stay whole.
        """
        if not self._windowed:
            return num_tokens
        num_places = max(0, (self.pool.num_free - num_reserved) // self._num_groups)
        fitting = sequence.num_covered + num_places * self._block_size - sequence.num_scheduled
        return min(num_tokens, fitting or self._block_size)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Extend the tables to cover ``num_tokens`` positions; the blocks must be free."""
        while sequence.num_covered < num_tokens:
            for table in sequence.block_tables:
                table.append(self.pool.allocate())
            sequence.num_covered += self._block_size

    # -- after a commit ----------------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Offer the blocks that committed steps have filled to other sequences; let go of those behind a window."""
        num_full = sequence.num_computed // self._block_size
        if num_full > sequence.num_published_blocks:
            if self.prefix_cache and sequence.cache_epoch == self._epoch:
                for index in range(sequence.num_published_blocks, num_full):
                    prefix_hash = self._hash_at(sequence, index)
                    for group, tag, _ in self._groups:
                        key = prefix_hash + tag
                        self.pool.publish(sequence.block_tables[group][index], key)
                        self.prefixes.note_published(key)
            sequence.num_published_blocks = num_full
        if sequence.num_computed >= sequence.next_drop:
            self._drop_behind_windows(sequence)

    def _drop_behind_windows(self, sequence: Sequence) -> None:
        """Release what no row can read any more.

        Steps in flight need no fence: their rows start at ``num_computed`` or later.
        """
        for group, _, window in self._windowed:
            first = self._capacity.first_block(window, sequence.num_computed)
            table = sequence.block_tables[group]
            for index in range(sequence.first_blocks[group], first):
                self.pool.release(table[index])
                table[index] = NO_BLOCK
            sequence.first_blocks[group] = first
        sequence.next_drop = self._next_drop(sequence)

    def _next_drop(self, sequence: Sequence) -> int:
        """How many tokens must be computed for another block to fall behind a window."""
        ends = [
            (sequence.first_blocks[group] + 1) * self._block_size + window - 1 for group, _, window in self._windowed
        ]
        return min(ends, default=NEVER)

    def withdraw(self, sequence: Sequence) -> None:
        """Take what a sequence computed or read out of the prefix cache: it is not to be trusted.

        Whoever shares a block keeps it, but nobody new finds it: were it to stay for as long as others hold it,
        requests that overlap would pass on one that is at fault for ever.
        """
        pool = self.pool
        for prefix_hash in sequence.block_hashes:
            for _, tag, _ in self._groups:
                key = prefix_hash + tag
                self.host.forget(key)
                block_id = pool.lookup(key)
                if block_id is not None:
                    pool.unpublish(block_id)
                    self.num_withdrawn_shared += pool.ref_count(block_id) > 1

    # -- letting go --------------------------------------------------------------------------------------------------

    def held_blocks(self, sequence: Sequence) -> list[int]:
        """A sequence's blocks in the order of release: last first, so that beginnings of prefixes are kept longest."""
        if self._num_groups == 1:
            return sequence.block_tables[0][: sequence.first_blocks[0] - 1 if sequence.first_blocks[0] else None : -1]
        positions = reversed(range(min(sequence.first_blocks), len(sequence.block_tables[0])))
        return [t[index] for index in positions for t in sequence.block_tables if t[index] != NO_BLOCK]

    def release(self, block_ids: list[int]) -> None:
        """Let go of what ``held_blocks`` returned."""
        for block_id in block_ids:
            self.pool.release(block_id)

    def reset(self) -> None:
        """Forget every prefix: nothing computed so far is ever matched again. Sequences keep what they hold."""
        self._epoch += 1
        self.pool.clear_index()
        self.host.clear()

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """The saves and restores for the plan that is being made."""
        return self.host.take_copies()

    def _hash_at(self, sequence: Sequence, index: int) -> bytes:
        return hash_at(sequence, index, self._block_size)
