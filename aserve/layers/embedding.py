"""The two ends of the vocabulary: token ids to vectors, and vectors to logits. Both are cut by vocabulary rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from aserve.layers.context import LayerContext
from aserve.layers.linear import ColumnParallelLinear, even_share


class VocabParallelEmbedding:
    """Token ids to vectors; each rank holds a range of the vocabulary. Satisfies ``Loadable``.

    Attributes:
        weight: [vocab_size / ranks, hidden_size].
    """

    __slots__ = ("_first", "_group", "_last", "_shape", "weight")

    def __init__(self, name: str, vocab_size: int, hidden_size: int, ctx: LayerContext) -> None:
        self._first, self._last = even_share(name, vocab_size, ctx)
        self._shape = (vocab_size, hidden_size)
        self._group = ctx.group
        self.weight = torch.empty(self._last - self._first, hidden_size, dtype=ctx.dtype, device=ctx.device)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return the vectors [T, hidden_size] of ``input_ids`` [T]."""
        if self._group.size == 1:
            return functional.embedding(input_ids, self.weight)
        elsewhere = (input_ids < self._first) | (input_ids >= self._last)
        vectors = functional.embedding((input_ids - self._first).masked_fill_(elsewhere, 0), self.weight)
        return self._group.all_reduce(vectors.masked_fill_(elsewhere[:, None], 0))

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        return {"weight": self._shape}

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        self.weight.copy_(tensor[self._first : self._last])

    def finish_loading(self) -> None:
        """Nothing to do: the rows are looked up as they are."""


class LMHead:
    """Hidden states to float32 logits, with a matrix of its own."""

    __slots__ = ("_group", "_linear", "weights")

    def __init__(self, name: str, hidden_size: int, vocab_size: int, ctx: LayerContext) -> None:
        self._linear = ColumnParallelLinear(name, hidden_size, vocab_size, ctx)
        self._group = ctx.group
        self.weights = self._linear.weights

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [S, V] float32, a new tensor, for ``hidden`` [S, H]."""
        return self._group.all_gather(self._linear(hidden)).float()


class TiedLMHead:
    """Hidden states to float32 logits, with the embedding's matrix. Its ``Loadable`` stands for the embedding's."""

    __slots__ = ("_embedding", "_group", "_method")

    def __init__(self, name: str, embedding: VocabParallelEmbedding, ctx: LayerContext) -> None:
        self._embedding = embedding
        self._method = ctx.quant.method_for(name, ctx.kernels)
        self._group = ctx.group

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [S, V] float32, a new tensor, for ``hidden`` [S, H]."""
        return self._group.all_gather(self._method.apply(hidden, None)).float()

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        return self._embedding.tensor_shapes(shard)

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        self._embedding.load(shard, name, tensor)

    def finish_loading(self) -> None:
        self._embedding.finish_loading()
        self._method.adopt(self._embedding.weight)
        self._method.finish_loading()
