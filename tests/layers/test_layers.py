"""Norm, embedding, heads and rotary table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from aserve.core.rope_spec import RopeSpec
from aserve.layers.context import LayerContext
from aserve.layers.embedding import LMHead, TiedLMHead, VocabParallelEmbedding
from aserve.layers.norm import RmsNorm
from aserve.layers.rotary import build_cos_sin, rope_frequencies
from aserve.layers.weights import WeightRow, expand_weights

Context = Callable[..., LayerContext]
CPU = torch.device("cpu")


def test_norm_of_strided_rows_in_place(context: Context) -> None:
    norm = RmsNorm(8, 1e-5, context())
    weight = torch.randn(8)
    norm.load("", "weight", weight)
    whole = torch.randn(3, 5, 8)
    part = whole[:, 1:3]
    want = functional.rms_norm(part, (8,), weight, 1e-5)
    left = whole[:, 3:].clone()
    assert torch.allclose(norm(part), want, atol=1e-6)
    norm.in_place(part)
    assert torch.allclose(whole[:, 1:3], want, atol=1e-6)
    assert torch.equal(whole[:, 3:], left)


def test_norm_adds_the_residual_first(context: Context) -> None:
    norm = RmsNorm(8, 1e-5, context())
    norm.load("", "weight", torch.ones(8))
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    total = x + residual
    normed, summed = norm.add_and_norm(x, residual)
    assert torch.allclose(summed, total)
    assert torch.allclose(normed, functional.rms_norm(total, (8,), None, 1e-5), atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_embedding_sums_to_the_whole(context: Context, size: int) -> None:
    table = torch.randn(12, 6)
    ids = torch.tensor([0, 11, 5, 6, 5])
    total = torch.zeros(5, 6)
    for rank in range(size):
        embedding = VocabParallelEmbedding("embedding", 12, 6, context(rank, size))
        assert embedding.tensor_shapes("") == {"weight": (12, 6)}
        embedding.load("", "weight", table)
        total += embedding(ids)
    assert torch.equal(total, table[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_tied_and_untied_heads_agree_and_give_float32(context: Context, size: int, dtype: torch.dtype) -> None:
    table = torch.randn(12, 16).to(dtype)
    hidden = torch.randn(3, 16).to(dtype)
    for tied in (False, True):
        parts: list[Tensor] = []
        for rank in range(size):
            ctx = context(rank, size, dtype)
            if tied:
                embedding = VocabParallelEmbedding("embedding", 12, 16, ctx)
                head = TiedLMHead("lm_head", embedding, ctx)
                head.load("", "weight", table)
                head.finish_loading()
                assert torch.equal(embedding.weight, table.chunk(size)[rank])
            else:
                head = LMHead("lm_head", 16, 12, ctx)
                head.weights.load("", "weight", table)
                head.weights.finish_loading()
            parts.append(head(hidden))
        logits = torch.cat(parts, dim=1)
        assert logits.dtype == torch.float32
        assert torch.allclose(logits, functional.linear(hidden, table).float(), rtol=1e-2, atol=1e-2)


def test_table_has_cos_then_sin() -> None:
    table = build_cos_sin(RopeSpec(rope_type="default", rotary_dim=8, theta=10000.0), 50, CPU)
    angles = torch.arange(50).double()[:, None] * 10000.0 ** (-torch.arange(4).double() / 4)
    assert table.dtype == torch.float32
    assert torch.allclose(table.double(), torch.cat((angles.cos(), angles.sin()), 1), atol=1e-5)


def test_yarn_keeps_fast_channels_and_stretches_slow_ones() -> None:
    sizes = {"rotary_dim": 64, "theta": 10000.0}
    plain = rope_frequencies(RopeSpec(rope_type="default", **sizes), 9)
    yarn = RopeSpec(rope_type="yarn", factor=8.0, original_max_positions=2048, attention_factor=1.2, **sizes)
    ratio = plain / rope_frequencies(yarn, 9)
    assert torch.allclose(ratio[:4], torch.ones(4))
    assert torch.allclose(ratio[-4:], torch.full((4,), 8.0))
    assert bool((ratio.diff() > -1e-4).all())
    assert torch.allclose(build_cos_sin(yarn, 2, CPU)[0, :32], torch.full((32,), 1.2))


def test_a_table_row_may_not_write_twice(context: Context) -> None:
    class Model:
        norms = (RmsNorm(4, 1e-5, context()), RmsNorm(4, 1e-5, context()))

    rows = (WeightRow("layers.*.norm", "norms.*"),)
    targets = expand_weights(Model(), rows, range(2))
    assert list(targets) == ["layers.0.norm.weight", "layers.1.norm.weight"]
    assert targets["layers.1.norm.weight"].layer is Model.norms[1]
    with pytest.raises(AssertionError, match=r"layers\.0\.norm\.weight"):
        expand_weights(Model(), rows * 2, range(2))
