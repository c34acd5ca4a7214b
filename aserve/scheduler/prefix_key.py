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


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """The prefix hash of a full block that follows the prefix ``parent``."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def root_hash(cache_salt: bytes) -> bytes:
    """The parent of a sequence's first block."""
    return blake2b(cache_salt, digest_size=HASH_BYTES, person=b"aserve-prefix").digest()


def hash_at(sequence: Sequence, index: int, block_size: int) -> bytes:
    """The prefix hash of a sequence's block ``index``, all of whose tokens are known."""
    hashes = sequence.block_hashes
    while len(hashes) <= index:
        parent = hashes[-1] if hashes else root_hash(sequence.request.cache_salt)
        start = len(hashes) * block_size
        hashes.append(hash_block(parent, sequence.token_ids[start : start + block_size]))
    return hashes[index]
