"""Bytes that one largest step takes beside weights and KV, from the model's sizes.

A mirror of the code in ``layers``, ``models`` and ``runtime``: which tensors are alive at the same moment, phase by
phase. ``tests/planning`` counts the tensors of the real code for real sizes and compares. A server measures the same
step on a GPU, and asks this module what a change of a limit would save; on a CPU this is its estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from aserve.core.kv_layout import KVLayout
from aserve.core.model_spec import ModelSpec
from aserve.planning.limits import Limits
from aserve.planning.step_shapes import step_shapes

MATMUL_WORKSPACE_BYTES = 32 * 2**20
"""What cuBLAS takes at its first product on a Hopper GPU, through torch (``CUBLAS_WORKSPACE_CONFIG``)."""

PENALTY_SCRATCH_BYTES = 32 * 2**20
"""Most memory that applying penalties takes beside their state, a single row longer than that aside."""

_FLOAT_BYTES = 4  # logits, attention's parts, the state of penalties
_INDEX_BYTES = 8
_MULTIPROCESSORS = 132  # of an H100 or H200
_WAVES = 4  # decode attention splits keys until it has so many programs for each of them
_MAX_SPLITS = 32
_ALIGNMENT = 64
_LAYER_NODES_BYTES = 64 * 2**10  # of a captured step, for the kernels of one layer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What is alive at the highest moment of each phase of a step; phases follow each other.

    Attributes:
        inputs: ids, positions, block tables: all the time.
        attention: in an attention layer.
        mlp: in a feed-forward layer.
        head: from the last hidden states to sampled tokens and their log-probabilities.
        penalties: their state when every sequence uses them, and the room to apply them: all the time.
        workspace: of matrix products: all the time.
    """

    inputs: int
    attention: int
    mlp: int
    head: int
    penalties: int
    workspace: int

    @property
    def total(self) -> int:
        """The peak."""
        return self.inputs + self.penalties + self.workspace + max(self.attention, self.mlp, self.head)


def penalty_state_bytes(num_seqs: int, *, vocab_size: int, max_length: int) -> int:
    """Return the bytes of the penalties' state of so many sequences: counts by token, and the tokens themselves."""
    return num_seqs * (vocab_size + max_length) * _FLOAT_BYTES


def step_bytes(
    spec: ModelSpec, limits: Limits, *, dtype_bytes: int, block_size: int, ranks: int = 1, on_gpu: bool = True
) -> StepBytes:
    """Return the bytes of the largest step that ``limits`` allow, on each of ``ranks`` devices."""
    num_seqs = min(limits.max_num_seqs, limits.max_batch_tokens)
    num_tokens = min(limits.max_batch_tokens, num_seqs * limits.max_model_len)
    forward = _forward_bytes(spec, num_tokens, num_seqs, dtype_bytes=dtype_bytes, ranks=ranks)
    # Sampling copies logits where rows ask for different things: once all, and once those of all rows but one.
    sampled = (3 * num_seqs - 1) * spec.vocab_size * _FLOAT_BYTES
    return StepBytes(
        inputs=_input_bytes(
            num_tokens,
            num_seqs,
            num_groups=len(KVLayout.of(spec.sliding_windows).groups),
            table_width=-(-limits.max_model_len // block_size),
        ),
        attention=forward.attention,
        mlp=forward.mlp,
        head=max(forward.head, sampled),
        penalties=PENALTY_SCRATCH_BYTES
        + penalty_state_bytes(limits.max_num_seqs, vocab_size=spec.vocab_size, max_length=limits.max_model_len),
        workspace=MATMUL_WORKSPACE_BYTES if on_gpu else 0,
    )


def graph_bytes(spec: ModelSpec, limits: Limits, *, dtype_bytes: int, block_size: int, ranks: int = 1) -> int:
    """Return the bytes of all captured steps: they share what the largest takes, and each has nodes of its own."""
    shapes = step_shapes(max_num_seqs=limits.max_num_seqs, max_batch_tokens=limits.max_batch_tokens)
    pool = max(
        max(_forward_bytes(spec, shape.num_tokens, shape.num_seqs, dtype_bytes=dtype_bytes, ranks=ranks))
        for shape in shapes
    )
    inputs = _input_bytes(
        max(shape.num_tokens for shape in shapes),
        max(shape.num_seqs for shape in shapes),
        num_groups=len(KVLayout.of(spec.sliding_windows).groups),
        table_width=-(-limits.max_model_len // block_size),
    )
    return pool + inputs + MATMUL_WORKSPACE_BYTES + len(shapes) * spec.num_layers * _LAYER_NODES_BYTES


class _Forward(NamedTuple):
    """Bytes alive in the phases of a step up to its logits."""

    attention: int
    mlp: int
    head: int


def _forward_bytes(spec: ModelSpec, num_tokens: int, num_seqs: int, *, dtype_bytes: int, ranks: int) -> _Forward:
    row = num_tokens * dtype_bytes
    hidden = row * spec.hidden_size
    heads, kv_heads = spec.num_heads // ranks, max(1, spec.num_kv_heads // ranks)
    attended = row * heads * spec.head_dim
    qkv = attended + row * 2 * kv_heads * spec.head_dim
    splits = decode_splits(num_seqs * kv_heads)
    parts = num_seqs * heads * splits * (spec.head_dim + 2) * _FLOAT_BYTES
    # The layer before still names the input of its successor: three hidden states live through every layer but one.
    kept = (3 if spec.num_layers > 1 else 2) * hidden
    selected = num_seqs * spec.hidden_size * dtype_bytes if num_seqs < num_tokens else 0
    return _Forward(
        attention=2 * hidden + qkv + attended + max(parts, hidden),
        mlp=kept + max(_mlp_bytes(spec, row, ranks=ranks), _mixture_bytes(spec, num_tokens, row, ranks=ranks)),
        head=hidden + selected + num_seqs * spec.vocab_size * (_FLOAT_BYTES + dtype_bytes),
    )


def _mlp_bytes(spec: ModelSpec, row: int, *, ranks: int) -> int:
    """Beside its input, in a layer without experts; ``row``: bytes of one channel of all tokens."""
    activated = row * spec.intermediate_size // ranks
    return activated + max((2 if spec.gated_mlp else 1) * activated, row * spec.hidden_size)


def _mixture_bytes(spec: ModelSpec, num_tokens: int, row: int, *, ranks: int) -> int:
    """The same in a layer with experts: every token is there once for each expert that computes it."""
    experts = spec.experts
    if experts is None:
        return 0
    hidden, inner = row * spec.hidden_size, row * experts.intermediate_size // ranks
    active = experts.num_active
    phases = (hidden + 2 * inner, 3 * inner, inner + hidden, 2 * hidden)
    # What was chosen, that in order, the order and the rows by it; the weights of what was chosen.
    chosen = num_tokens * active * 4 * _INDEX_BYTES + row * active
    shared = row * experts.shared_size // ranks
    return max(chosen + active * max(phases), hidden + shared + max(2 * shared, hidden) if shared else 0)


def decode_splits(num_programs: int) -> int:
    """Into how many parts decode attention splits the keys of each of so many pairs of a sequence and a KV head."""
    return max(1, min(_WAVES * _MULTIPROCESSORS // num_programs, _MAX_SPLITS))


def _input_bytes(num_tokens: int, num_seqs: int, *, num_groups: int, table_width: int) -> int:
    """Ids, positions, and per KV group places in the cache and block tables as wide as the longest request."""
    by_token = (num_tokens * _INDEX_BYTES,) * 2 + (num_groups * num_tokens * _INDEX_BYTES,)
    by_row = ((num_seqs + 1) * 4, num_seqs * 4, num_groups * num_seqs * table_width * 4)
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in (*by_token, *by_row))
