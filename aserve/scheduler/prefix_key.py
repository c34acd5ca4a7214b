"""The names of prefix blocks: a chain of 128-bit BLAKE2b hashes over token ids, and the group whose KV is meant.

The chain goes over the bytes of each full block's token ids, the parent's hash included and the request's
``cache_salt`` at the root, so equal hashes mean equal prefixes (Python's ``hash`` collides, and differs by process).
Used by ``KVCacheManager``.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from aserve.scheduler.sequence import Sequence

HASH_BYTES = 16
_TOKEN_BYTES = array("q").itemsize


def root_hash(cache_salt: bytes) -> bytes:
    """The parent of a sequence's first block."""
    return blake2b(cache_salt, digest_size=HASH_BYTES, person=b"aserve-prefix").digest()


def extend_hashes(sequence: Sequence, count: int, block_size: int) -> None:
    """Make the sequence's prefix hashes up to ``count``; the tokens of so many blocks are known."""
    hashes = sequence.block_hashes
    start = len(hashes)
    if count <= start:
        return
    parent = hashes[-1] if hashes else root_hash(sequence.request.cache_salt)
    size = block_size * _TOKEN_BYTES
    data = array("q", sequence.token_ids[start * block_size : count * block_size]).tobytes()
    for offset in range(0, len(data), size):
        parent = blake2b(parent + data[offset : offset + size], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def hash_at(sequence: Sequence, index: int, block_size: int) -> bytes:
    """The prefix hash of a sequence's block ``index``, all of whose tokens are known."""
    if index >= len(sequence.block_hashes):
        extend_hashes(sequence, index + 1, block_size)
    return sequence.block_hashes[index]
