"""Self-attention over the paged KV cache: projections, optional QK norm, rotary embedding, store, attend."""

from __future__ import annotations

from torch import Tensor

from aserve.core.errors import ModelLoadError
from aserve.core.kv_layout import KVLayout
from aserve.core.model_spec import ModelSpec
from aserve.layers.batch import ForwardBatch
from aserve.layers.context import LayerContext
from aserve.layers.linear import QKVParallelLinear, RowParallelLinear, even_share
from aserve.layers.norm import LayerNormByHead, RmsNorm
from aserve.layers.row_order import head_channels, projection_orders


class Attention:
    """Grouped-query attention of one layer, as the spec describes it (biases, QK norm, window, caps)."""

    def __init__(self, name: str, spec: ModelSpec, layer: int, ctx: LayerContext, *, cos_sin: Tensor) -> None:
        """``cos_sin`` [positions, rotary_dim] float32 is shared by all layers with the same rope."""
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.qkv_proj = QKVParallelLinear(
            f"{name}.qkv_proj", spec.hidden_size, heads, ctx, bias=spec.qkv_bias, orders=projection_orders(spec)
        )
        self.o_proj = RowParallelLinear(
            f"{name}.o_proj", spec.num_heads * spec.head_dim, spec.hidden_size, ctx, bias=spec.output_bias
        )
        self.q_norm, self.k_norm = (_qk_norm(f"{name}.{n}", spec, ctx, heads[i]) for i, n in enumerate(("q", "k")))
        # The kernel normalises heads that share a weight; every other norm comes before it.
        shared = spec.qk_norm == "head"
        self._q_weight, self._k_weight = (
            norm.weight if shared and isinstance(norm, RmsNorm) else None for norm in (self.q_norm, self.k_norm)
        )
        self._normalizes_before = spec.qk_norm in ("whole", "layer_by_head")
        self._head_dim = spec.head_dim
        self._heads = (self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, self.qkv_proj.num_kv_heads)
        self._num_all_heads = sum(self._heads)
        layout = KVLayout.of(spec.sliding_windows)
        self._group, self._cache = layout.group_of(layer), layout.index_of(layer)
        self._scale = spec.attention_scale
        self._softcap = spec.attention_softcap
        self._window = spec.sliding_windows[layer]
        self._cos_sin = cos_sin
        self._eps = spec.norm_eps
        self._rotary_and_store = ctx.kernels.rotary_and_store
        self._attend = ctx.kernels.paged_attention

    def __call__(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Return [T, H], a new tensor, for ``hidden`` [T, H]; writes this layer's keys and values to its caches."""
        qkv = self.qkv_proj(hidden).view(-1, self._num_all_heads, self._head_dim)
        q, k, v = qkv.split(self._heads, dim=1)  # views of [T, heads, head_dim]
        if self._normalizes_before:
            _normalize(self.q_norm, q)
            _normalize(self.k_norm, k)
        slot_mapping, block_table = batch.groups[self._group]
        k_cache, v_cache = batch.kv_caches[self._cache]
        self._rotary_and_store(
            q,
            k,
            v,
            batch.positions,
            self._cos_sin,
            k_cache,
            v_cache,
            slot_mapping,
            q_weight=self._q_weight,
            k_weight=self._k_weight,
            eps=self._eps,
        )
        out = self._attend(
            q,
            k_cache,
            v_cache,
            block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=self._scale,
            window=self._window,
            softcap=self._softcap,
        )
        return self.o_proj(out.view(out.shape[0], -1))


def _qk_norm(name: str, spec: ModelSpec, ctx: LayerContext, num_heads: int) -> RmsNorm | LayerNormByHead | None:
    """Return the norm of queries or keys, of ``num_heads`` in the whole model. Raises ModelLoadError."""
    if spec.qk_norm == "none":
        return None
    if spec.qk_norm == "head":
        return RmsNorm(spec.head_dim, spec.norm_eps, ctx, unit_offset=spec.norm_unit_offset)
    if spec.qk_norm == "whole":
        if ctx.group.size > 1:
            raise ModelLoadError(
                f"{name}_norm is over all heads, so they cannot be divided over {ctx.group.size} devices"
            )
        return RmsNorm(num_heads * spec.head_dim, spec.norm_eps, ctx)
    first, last = even_share(f"{name}_norm", num_heads, ctx)
    return LayerNormByHead((num_heads, first, last - first), spec.norm_eps, ctx, head_channels(spec))


def _normalize(norm: RmsNorm | LayerNormByHead | None, x: Tensor) -> None:
    """Normalise ``x`` [T, heads, D] in place: all heads as one row, or each by itself."""
    if isinstance(norm, RmsNorm):
        norm.in_place(x.flatten(1))  # a view: heads and channels lie side by side
    elif norm is not None:
        norm.in_place(x)
