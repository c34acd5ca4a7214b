"""The layers of a BERT encoder: post-norm blocks of attention that sees all of an input, and a plain feed-forward.

Attention is torch's ``scaled_dot_product_attention`` over inputs that are padded to the longest of their group: no KV
cache, nothing to page. The same on every device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from aserve.core.encoder_spec import EncoderSpec
from aserve.layers.context import LayerContext
from aserve.layers.encoder_batch import EncoderBatch
from aserve.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear


class LayerNorm:
    """Normalises the last dimension, of ``size`` channels, to mean 0 and variance 1; satisfies ``Loadable``."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, size: int, eps: float, ctx: LayerContext) -> None:
        self._weight, self._bias = (torch.empty(size, dtype=ctx.dtype, device=ctx.device) for _ in range(2))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` [T, size], a new tensor."""
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self._weight.shape), "bias": tuple(self._bias.shape)}

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        (self._weight if name == "weight" else self._bias).copy_(tensor)

    def finish_loading(self) -> None:
        """Nothing to do: the weights are used as they are."""


class EncoderLayer:
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    __slots__ = (
        "_activate",
        "_head_dim",
        "_num_heads",
        "attention_norm",
        "down",
        "mlp_norm",
        "output",
        "qkv_proj",
        "up",
    )

    def __init__(self, name: str, spec: EncoderSpec, ctx: LayerContext) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        heads = (spec.num_heads, spec.num_heads, spec.head_dim)
        self.qkv_proj = QKVParallelLinear(f"{name}.attention.self", hidden, heads, ctx, bias=True)
        self.output = RowParallelLinear(f"{name}.attention.output.dense", hidden, hidden, ctx, bias=True)
        self.attention_norm = LayerNorm(hidden, spec.norm_eps, ctx)
        self.up = ColumnParallelLinear(f"{name}.intermediate.dense", hidden, inner, ctx, bias=True)
        self.down = RowParallelLinear(f"{name}.output.dense", inner, hidden, ctx, bias=True)
        self.mlp_norm = LayerNorm(hidden, spec.norm_eps, ctx)
        self._num_heads, self._head_dim = self.qkv_proj.num_heads, spec.head_dim
        self._activate = _ACTIVATIONS[spec.activation]

    def __call__(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        """Return [T, H], a new tensor, for ``x`` [T, H]."""
        x = self.attention_norm(x + self.output(self._attend(self.qkv_proj(x), batch)))
        return self.mlp_norm(x + self.down(self._activate(self.up(x))))

    def _attend(self, qkv: Tensor, batch: EncoderBatch) -> Tensor:
        """Return [T, heads * D] for queries, keys and values [T, 3 * heads * D]."""
        width = self._num_heads * self._head_dim
        out = qkv.new_empty(qkv.shape[0], width)
        for tokens, mask, kept, places in batch.groups:
            padded = qkv[tokens].view(*tokens.shape, 3, self._num_heads, self._head_dim)
            q, k, v = padded.permute(2, 0, 3, 1, 4)  # each [S, heads, L, D]
            attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            flat = attended.transpose(1, 2).reshape(-1, width)
            out.index_copy_(0, places, flat if len(kept) == len(flat) else flat.index_select(0, kept))
        return out


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS = {"gelu": functional.gelu, "gelu_tanh": _gelu_tanh, "relu": functional.relu}
