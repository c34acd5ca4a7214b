"""One protocol per operation (shapes, dtypes, aliasing) and the frozen set of them that layers are given.

Letters: T tokens of a step, S sequences, H hidden size, Hq and Hkv query and KV heads, D head size, N KV blocks,
P tokens per block, B widest block table, V vocabulary. All tensors of a call live on one device, and are contiguous
where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor


class Linear(Protocol):
    """A matrix product with a plain weight."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [T, N] in x's dtype.

        Token rows of x may be strided. All three have one dtype; sums are in float32.
        """
        ...


class GroupedLinear(Protocol):
    """A matrix product in which each group of rows has a plain weight of its own, as the experts of a layer have."""

    def __call__(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return [R, N] in x's dtype: rows ``ends[e - 1]`` to ``ends[e]`` of ``x`` [R, K] times ``weight[e]``.

        ``weight`` [E, N, K] is multiplied transposed; ``ends`` [E] int32 never falls, and its last is R: groups may be
        empty. All but ``ends`` have one dtype; sums are in float32.
        """
        ...


class PackedMatrix(Protocol):
    """The product with one matrix that a backend keeps in a form of its own."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what ``Linear`` returns for the matrix that was packed; ``x`` may have any strides."""
        ...


class PackMatrix(Protocol):
    """Brings a matrix that stays as it is into the form that a backend reads fastest."""

    def __call__(self, weight: Tensor) -> PackedMatrix | None:
        """Return the product with ``weight`` [N, K], which is not needed any more; None to use ``Linear`` with it."""
        ...


def keep_plain(weight: Tensor) -> PackedMatrix | None:
    """The ``PackMatrix`` of backends without a form of their own."""
    return None


class UseThreads(Protocol):
    """Sets on how many threads the CPU computes."""

    def __call__(self, number: int, dtype: torch.dtype) -> None:
        """Compute on ``number`` threads a model with weights and activations of ``dtype``.

        Called on the thread that calls the operations, before the first of them.
        """
        ...


def use_torch_threads(number: int, dtype: torch.dtype) -> None:
    """The ``UseThreads`` of backends whose operations are torch's; for OpenMP it is a setting of the calling thread."""
    torch.set_num_threads(number)


class RmsNorm(Protocol):
    """Root-mean-square normalisation (Zhang and Sennrich 2019)."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        """Normalise the last dimension of ``x``, [T, H] or [T, heads, H], and scale it by ``weight`` [H].

        Tokens and heads may be strided, the last dimension is contiguous. Accumulates in float32. A weight of x's
        dtype scales what was rounded to that dtype, as in Llama; a float32 weight beside a narrower x scales in
        float32 before the one rounding, as in Gemma. ``out`` may be ``x``.
        """
        ...


class FusedAddRmsNorm(Protocol):
    """Residual addition followed by RMS normalisation, in one pass."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), both [T, H] in x's dtype.

        The sum is rounded to x's dtype first; the weight's dtype means what it does for ``RmsNorm``. Both arguments
        may be overwritten and returned.
        """
        ...


class Rotary(Protocol):
    """Rotary position embedding (Su et al. 2021), the half-split form of GPT-NeoX."""

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate ``q`` [T, Hq, D] and ``k`` [T, Hkv, D] in place.

        ``positions`` [T] int64 indexes ``cos_sin`` [max positions, R] float32, R <= D even: the first half of a row
        is cos, the second sin. The first R channels are rotated, in float32; the rest stays. Token rows of q and k
        may be strided, heads and channels are contiguous.
        """
        ...


class SiluAndMul(Protocol):
    """The gated activation of Llama's MLP."""

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return silu(x[:, :I]) * x[:, I:] for ``x`` [T, 2 I], as [T, I], computed in float32.

        The silu may be rounded to x's dtype before the product, as it is in the reference models.
        """
        ...


class GeluTanhAndMul(Protocol):
    """The gated activation of Gemma's MLP."""

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return gelu(x[:, :I]) * x[:, I:] for ``x`` [T, 2 I], as [T, I], computed in float32.

        gelu(g) is g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))). It may be rounded to x's dtype before the
        product, as it is in the reference models. Token rows of ``x`` may be strided.
        """
        ...


class StoreKv(Protocol):
    """Writes new keys and values into the paged cache."""

    def __call__(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Copy ``k`` and ``v`` [T, Hkv, D] to rows ``slot_mapping`` [T] int64 of the caches [N, P, Hkv, D].

        Row r is block r // P, place r % P. Negative rows are skipped. Token rows of k and v may be strided.
        """
        ...


class RotaryAndStore(Protocol):
    """Everything between the projection and the attention: ``RmsNorm`` of heads, ``Rotary`` and ``StoreKv`` in one."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Rotate ``q`` [T, Hq, D] in place, and write ``k``, rotated, and ``v`` [T, Hkv, D] to the caches.

        With weights [D], which come in pairs, the heads of q and k are normalised first. Arguments and roundings are
        those of the three operations; k may be overwritten.
        """
        ...


class PagedAttention(Protocol):
    """Causal attention of a mixed batch of prefill chunks and decodes over the paged cache (Kwon et al. 2023)."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        *,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return attention outputs [T, Hq, D] in q's dtype; softmax in float32.

        ``q`` [T, Hq, D], token rows may be strided; caches [N, P, Hkv, D] already hold the keys and values of the
        step's own tokens; ``block_tables`` [S, B] int32; sequence s has queries ``cu_seqlens_q[s]`` to
        ``cu_seqlens_q[s + 1]`` ([S + 1] int32), which are the last of its ``seq_lens[s]`` ([S] int32) positions. A
        query at position p sees positions max(0, p - window + 1) to p. Query head h reads KV head h // (Hq / Hkv).
        Scores are scale * q k^T, and with ``softcap`` c > 0 then c * tanh(score / c).

        ``max_query_len`` and ``max_seq_len`` are at least the true ones. A sequence of length 0, which pads a batch,
        gets zeros. Table entries past a sequence's last block name one of its own blocks, and what its blocks hold
        past its length is finite: nothing of that reaches the sequence. (A backend may read it and give it the
        weight 0, which would not hide a NaN; clearing a block when it is handed out is cheaper than clearing what is
        read in every layer of every step.) Entries whose whole block lies behind the window of the sequence's first
        query name any block, perhaps another sequence's: a backend does not let that in even with the weight 0.
        """
        ...


class Sample(Protocol):
    """Draws one token per row; a pure function of its arguments, so a row never depends on its batch."""

    def __call__(
        self,
        logits: Tensor,
        temperatures: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        min_ps: Tensor,
        uniforms: Tensor,
    ) -> Tensor:
        """Return token ids [S] int64 for ``logits`` [S, V] float32, by inverse transform sampling.

        ``temperatures``, ``top_ps``, ``min_ps`` [S] float32, ``top_ks`` [S] int32, ``uniforms`` [S] float32 in
        [0, 1). Temperature 0 takes the first of the largest logits. Otherwise probabilities are
        softmax(logits / temperature); kept are the top_k largest (0: all), of those the smallest most-likely-first
        prefix whose share of the kept mass reaches top_p (at least one), of those the ones with at least min_p times
        the largest probability. The kept ones are renormalised; the token is the first whose cumulative probability
        exceeds the uniform, in order of falling probability (ties by id) when any filter is on, else by id. A filter
        is on when 0 < top_k < V, top_p < 1 or min_p > 0.

        Logits may be -inf, if not all of a row are. A row with NaN or +inf gets some id in [0, V) and does not disturb
        the others.
        """
        ...


def _in_turn(  # noqa: PLR0917 - the operands, after the set
    kernels: KernelSet,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    if q_weight is not None and k_weight is not None:
        kernels.rms_norm(q, q_weight, eps, out=q)
        kernels.rms_norm(k, k_weight, eps, out=k)
    kernels.rotary(q, k, positions, cos_sin)
    kernels.store_kv(k, v, k_cache, v_cache, slot_mapping)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The operations a model is built from, all of one backend unless single ones were replaced."""

    name: str
    linear: Linear
    grouped_linear: GroupedLinear
    rms_norm: RmsNorm
    fused_add_rms_norm: FusedAddRmsNorm
    rotary: Rotary
    silu_and_mul: SiluAndMul
    gelu_tanh_and_mul: GeluTanhAndMul
    store_kv: StoreKv
    paged_attention: PagedAttention
    sample: Sample
    fused_rotary_and_store: RotaryAndStore | None = None
    """None: ``rms_norm``, ``rotary`` and ``store_kv`` are called in turn. So must it be to swap one of these."""
    pack: PackMatrix = keep_plain
    use_threads: UseThreads = use_torch_threads
    can_be_captured: bool = False
    """Whether no operation looks at values on the host, so that a CUDA graph may hold it."""
    form: str = ""
    """What carries the operations out, where a backend has more than one way; for people to read."""

    @property
    def rotary_and_store(self) -> RotaryAndStore:
        """The fused operation, or its parts in turn."""
        return self.fused_rotary_and_store or partial(_in_turn, self)

    @property
    def description(self) -> str:
        """Name and form, for logs."""
        return f"{self.name} ({self.form})" if self.form else self.name

    def replace(self, **ops: Any) -> KernelSet:
        """Return a set with some operations swapped, for example to bisect a wrong kernel."""
        return replace(self, **ops)
