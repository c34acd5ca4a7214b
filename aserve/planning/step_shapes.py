"""Which steps are captured as CUDA graphs: numbers of tokens and sequences, rounded up so that few graphs serve all.

Used by the runtime, which captures them, and by the sizing of memory, which leaves room for them.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_PREFILL_TOKENS = 1024
"""Steps with prefill chunks of more tokens keep a GPU busy for longer than they take to launch."""

_PREFILL_TOKENS = (32, 64, 128, 256, 512, MAX_PREFILL_TOKENS)
_PREFILL_SEQS = (8, 64, 256)


class StepShape(NamedTuple):
    """What a graph is captured for: up to this many tokens and sequences, each of one token unless ``prefill``."""

    prefill: bool
    num_tokens: int
    num_seqs: int


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of sequences that decode graphs are captured for: an eighth apart, so little is wasted."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_num_seqs, 64)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def step_shapes(*, max_num_seqs: int, max_batch_tokens: int) -> list[StepShape]:
    """Return every shape worth a graph, the largest first: later captures then reuse the memory of earlier ones."""
    shapes = [StepShape(False, n, n) for n in decode_sizes(min(max_num_seqs, max_batch_tokens))]
    for num_tokens in _PREFILL_TOKENS:
        if num_tokens <= max_batch_tokens:
            counts = {min(n, max_num_seqs, num_tokens) for n in _PREFILL_SEQS}
            shapes += [StepShape(True, num_tokens, n) for n in counts]
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_seqs), reverse=True)
