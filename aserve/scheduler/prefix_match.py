"""Finds the cached beginning of a sequence: how long it is, which blocks hold it, and what that costs per plan.

A prefix can be reused when the groups without a window hold all of it and each window group holds what the window
before its end touches. Looking is cheap where it is done often: hashes are made in bounded pieces (130,000 tokens take
15 ms in one go, during which every stream would stand still), and a sequence that does not fit is not matched again
until something has changed for it. Takes hold of nothing; called by ``KVCacheManager`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aserve.core.capacity import Capacity
from aserve.core.step import NO_BLOCK
from aserve.scheduler.block_pool import BlockPool, PrefixKey
from aserve.scheduler.host_cache import HostCache
from aserve.scheduler.prefix_key import extend_hashes
from aserve.scheduler.sequence import Sequence

_PIECE = 32
"""Blocks hashed between two looks at whether more hashes are needed."""
_WORTH_WAITING = 16
"""A sequence waits for a step in flight only if that saves it this fraction of a full one: to wait costs time, too."""
_MAX_AGE = 64
"""Tries for which a refusal is believed: it misses a block that was evicted and that another sequence computed anew. A
plan tries a sequence once, or again for each prompt that starts in it."""
_MAX_REFUSALS = 2
"""Refusals that are remembered: of the first that waits, and of one that was picked before it for its prefix."""


@dataclass(slots=True)
class PrefixMatch:
    """A cached prefix as it was found; true until the next call that changes the pool.

    Attributes:
        num_blocks: its length in blocks.
        tables: per group, the blocks that hold it; ``NO_BLOCK`` behind the window and for what is in host memory.
        on_host: (group, index in the table, key) of the blocks that are to be restored.
        missing: keys of which at least one has to be cached for a longer match.
    """

    num_blocks: int = 0
    tables: list[list[int]] = field(default_factory=list[list[int]])
    on_host: list[tuple[int, int, PrefixKey]] = field(default_factory=list[tuple[int, int, PrefixKey]])
    missing: set[PrefixKey] = field(default_factory=set[PrefixKey])


@dataclass(slots=True)
class _Refusal:
    """Why a sequence was not started: it needs at least ``num_needed`` blocks, until one of ``wanted`` is cached."""

    num_needed: int
    wanted: set[PrefixKey]
    num_revivals: int
    age: int = 0


class PrefixMatcher:
    """Matches sequences against one pool and the host memory behind it."""

    def __init__(self, capacity: Capacity, pool: BlockPool, host: HostCache) -> None:
        self._capacity = capacity
        self._block_size = capacity.block_size
        self._pool = pool
        self._host = host
        self._groups = [(number, bytes([number]), window) for number, window in enumerate(capacity.windows)]
        self._full = [(number, tag) for number, tag, window in self._groups if window is None]
        self._windowed = [(number, tag, window) for number, tag, window in self._groups if window is not None]
        self._refusals: dict[Sequence, _Refusal] = {}  # oldest first

    # -- matching ----------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Find the longest cached prefix."""
        limit = self._limit(sequence)
        match = PrefixMatch()
        runs: dict[int, list[int]] = {}
        length = limit
        for group, tag in self._full:
            runs[group] = self._run(sequence, tag, length, match.missing)
            length = len(runs[group])
        if self._windowed:
            length = self._within_windows(sequence, length, match.missing)
        match.num_blocks = length
        for group, tag, window in self._groups:
            table = runs[group][:length] if window is None else self._window_table(sequence, tag, window, length)
            match.tables.append(table)
            if self._host.num_slots:
                first = self._capacity.first_block(window, length * self._block_size)
                match.on_host += [
                    (group, index, sequence.block_hashes[index] + tag)
                    for index in range(first, length)
                    if table[index] == NO_BLOCK
                ]
        return match

    def num_cached(self, sequence: Sequence) -> int:
        """Blocks that ``match`` would find among those hashed so far; an estimate, kept while it seems to hold."""
        limit = min(len(sequence.block_hashes), self._limit(sequence))
        length = sequence.num_cached_blocks
        tag = self._groups[0][1]
        if (
            not 0 <= length <= limit
            or (length > 0 and not self._is_cached(sequence, length - 1, tag))
            or (length < limit and self._is_cached(sequence, length, tag))
        ):
            length = limit
            for _, full_tag in self._full:
                length = len(self._run(sequence, full_tag, length, set()))
            length = self._within_windows(sequence, length, set())
            sequence.num_cached_blocks = length
        return length

    def is_worth_waiting(self, sequence: Sequence, num_matched: int, filled: list[set[bytes]]) -> bool:
        """Whether steps not committed yet, which make the blocks in ``filled`` full, compute much of what is missing.

        So choices of one prompt, and prompts with a new beginning in common, share it also if they come at once. They
        wait for a commit, never for the turn of another sequence. The first block is noted as ``awaited_hash``.
        """
        num_saved = self._num_forthcoming(sequence, num_matched, filled) * self._block_size
        num_missing = len(sequence.token_ids) - num_matched * self._block_size
        if num_saved < max(num_missing // 2, self._capacity.max_batch_tokens // _WORTH_WAITING, 1):
            return False
        sequence.awaited_hash = sequence.block_hashes[num_matched]
        return True

    def _num_forthcoming(self, sequence: Sequence, num_matched: int, filled: list[set[bytes]]) -> int:
        """Blocks behind a match that are in one of these sets without a gap: by so many it will be longer."""
        if not any(filled):
            return 0
        hashes, limit, index = sequence.block_hashes, self._limit(sequence), num_matched
        while index < limit:
            if index == len(hashes):
                extend_hashes(sequence, min(limit, index + _PIECE), self._block_size)
            if not any(hashes[index] in hashes_of_step for hashes_of_step in filled):
                break
            index += 1
        return index - num_matched

    def _run(self, sequence: Sequence, tag: bytes, limit: int, missing: set[PrefixKey]) -> list[int]:
        """The blocks of the leading cached positions of a group; ``NO_BLOCK`` for what is in host memory."""
        blocks: list[int] = []
        hashes, lookup, host = sequence.block_hashes, self._pool.lookup, self._host
        while len(blocks) < limit:
            if len(blocks) == len(hashes):
                extend_hashes(sequence, min(limit, len(hashes) + _PIECE), self._block_size)
            for prefix_hash in hashes[len(blocks) : limit]:
                key = prefix_hash + tag
                block_id = lookup(key)
                if block_id is None:
                    if key not in host:
                        missing.add(key)
                        return blocks
                    block_id = NO_BLOCK
                blocks.append(block_id)
        return blocks

    def _within_windows(self, sequence: Sequence, length: int, missing: set[PrefixKey]) -> int:
        """The longest prefix up to ``length`` that every window group can start from."""
        extend_hashes(sequence, length, self._block_size)
        known_from = {group: length for group, _, _ in self._windowed}  # these up to the length tried last are cached
        while True:
            for group, tag, window in self._windowed:
                first = self._capacity.first_block(window, length * self._block_size)
                index = min(known_from[group], length)
                while index > first and self._is_cached(sequence, index - 1, tag):
                    index -= 1
                known_from[group] = index
                if index > first:
                    missing.add(sequence.block_hashes[index - 1] + tag)
                    length = index - 1  # any longer one, up to the one tried, needs the missing block as well
                    break
            else:
                return length

    def _window_table(self, sequence: Sequence, tag: bytes, window: int, length: int) -> list[int]:
        first = self._capacity.first_block(window, length * self._block_size)
        found = [self._pool.lookup(prefix_hash + tag) for prefix_hash in sequence.block_hashes[first:length]]
        return [NO_BLOCK] * first + [NO_BLOCK if block_id is None else block_id for block_id in found]

    def _limit(self, sequence: Sequence) -> int:
        """Blocks that may be cached. The last known token is left to compute: its logits, or hidden state, are needed.

        A vector that every token has a part in needs all of them.
        """
        pooling = sequence.request.pooling
        if pooling is not None and pooling.needs_every_token:
            return 0
        return (len(sequence.token_ids) - 1) // self._block_size

    def _is_cached(self, sequence: Sequence, index: int, tag: bytes) -> bool:
        key = sequence.block_hashes[index] + tag
        return self._pool.lookup(key) is not None or key in self._host

    # -- what bounds the work of a plan ------------------------------------------------------------------------------

    def hash_ahead(self, sequence: Sequence, num_blocks: int) -> int:
        """Make up to ``num_blocks`` of the hashes that ``match`` would have to make. Returns what is left of them."""
        hashes = sequence.block_hashes
        limit = self._limit(sequence)
        while num_blocks > 0 and not self.is_hashed(sequence):
            count = min(_PIECE, num_blocks, limit - len(hashes))
            extend_hashes(sequence, len(hashes) + count, self._block_size)
            num_blocks -= count
        return num_blocks

    def is_hashed(self, sequence: Sequence) -> bool:
        """Whether ``match`` has no more hashes to make."""
        num_hashes = len(sequence.block_hashes)
        if num_hashes >= self._limit(sequence):
            return True
        # a match ends at the first block that a group without a window lacks
        return bool(self._full and num_hashes) and not self._is_cached(sequence, num_hashes - 1, self._full[0][1])

    def refuse(self, sequence: Sequence, match: PrefixMatch, num_needed: int) -> None:
        """Remember that a sequence was not started, for want of ``num_needed`` blocks."""
        wanted = match.missing | {key for _, _, key in match.on_host}
        self._refusals.pop(sequence, None)
        self._refusals[sequence] = _Refusal(num_needed, wanted, self._pool.num_revivals)
        if len(self._refusals) > _MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]

    def may_fit(self, sequence: Sequence, num_free: int) -> bool:
        """Whether a match can show that ``num_free`` blocks are enough; False only while a refusal holds. O(1).

        Of the blocks that were matched, only those that somebody holds need no free block. Such blocks become more
        when free ones are held again (``num_revivals`` counts that) or when a wanted key is published.
        """
        refusal = self._refusals.get(sequence)
        if refusal is None:
            return True
        refusal.age += 1
        least = refusal.num_needed - (self._pool.num_revivals - refusal.num_revivals)
        if least <= num_free or refusal.age > _MAX_AGE:
            del self._refusals[sequence]
            return True
        return False

    def note_published(self, key: PrefixKey) -> None:
        """A block is cached from now on."""
        for sequence in [sequence for sequence, refusal in self._refusals.items() if key in refusal.wanted]:
            del self._refusals[sequence]
