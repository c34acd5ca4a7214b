"""What the executor has to be told of a sequence beside its tokens: that it is new, and its new blocks. Pure."""

from __future__ import annotations

from aserve.core.step import NewSequence
from aserve.scheduler.sequence import Sequence


def announce(sequence: Sequence, start: int, block_size: int) -> tuple[NewSequence | None, tuple[tuple[int, ...], ...]]:
    """The news for a row that begins at position ``start``; they are not told again."""
    new, announced = None, sequence.num_announced
    if announced == 0:
        request = sequence.request
        prior = tuple(sequence.token_ids[:start])
        new = NewSequence(request.sampling, len(request.prompt_token_ids), prior, request.pooling)
    first = announced // block_size
    sequence.num_announced = sequence.num_covered
    return new, tuple([tuple(table[first:]) for table in sequence.block_tables])
