"""BERT (Devlin et al. 2019) and what is built like it (MiniLM, BGE, E5, GTE): encoders, for vectors and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from aserve.core.encoder_spec import EncoderSpec
from aserve.layers.context import LayerContext
from aserve.layers.embedding import VocabParallelEmbedding
from aserve.layers.encoder import EncoderLayer, LayerNorm
from aserve.layers.encoder_batch import EncoderBatch
from aserve.layers.linear import ColumnParallelLinear
from aserve.layers.weights import WeightRow, WeightTarget, expand_weights

_LAYER = "encoder.layer.*."
_WEIGHTS = (
    WeightRow("embeddings.word_embeddings", "words"),
    WeightRow("embeddings.position_embeddings", "positions"),
    WeightRow("embeddings.token_type_embeddings", "types"),
    WeightRow("embeddings.LayerNorm", "norm"),
    WeightRow(_LAYER + "attention.self.query", "layers.*.qkv_proj.weights", "q"),
    WeightRow(_LAYER + "attention.self.key", "layers.*.qkv_proj.weights", "k"),
    WeightRow(_LAYER + "attention.self.value", "layers.*.qkv_proj.weights", "v"),
    WeightRow(_LAYER + "attention.output.dense", "layers.*.output.weights"),
    WeightRow(_LAYER + "attention.output.LayerNorm", "layers.*.attention_norm"),
    WeightRow(_LAYER + "intermediate.dense", "layers.*.up.weights"),
    WeightRow(_LAYER + "output.dense", "layers.*.down.weights"),
    WeightRow(_LAYER + "output.LayerNorm", "layers.*.mlp_norm"),
)
_HEAD = (WeightRow("pooler.dense", "pooler.weights"), WeightRow("classifier", "classifier.weights"))


class Bert:
    """An encoder, with a classification head where the spec has labels. Letters: T tokens, S inputs, H hidden size."""

    PREFIXES: ClassVar[Mapping[str, str]] = {"bert.": ""}

    def __init__(self, spec: EncoderSpec, ctx: LayerContext) -> None:
        self.spec = spec
        self.ctx = ctx
        hidden = spec.hidden_size
        self.words = VocabParallelEmbedding("embeddings.word_embeddings", spec.vocab_size, hidden, ctx)
        self.positions = VocabParallelEmbedding("embeddings.position_embeddings", spec.max_positions, hidden, ctx)
        self.types = VocabParallelEmbedding("embeddings.token_type_embeddings", spec.num_types, hidden, ctx)
        self.norm = LayerNorm(hidden, spec.norm_eps, ctx)
        self.layers = [EncoderLayer(f"encoder.layer.{n}", spec, ctx) for n in range(spec.num_layers)]
        self.pooler: ColumnParallelLinear | None = None
        self.classifier: ColumnParallelLinear | None = None
        if spec.num_labels:
            self.pooler = ColumnParallelLinear("pooler.dense", hidden, hidden, ctx, bias=True)
            self.classifier = ColumnParallelLinear("classifier", hidden, spec.num_labels, ctx, bias=True)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Checkpoint names, as ``fnmatch`` patterns, of tensors that are not needed: other heads."""
        return ("embeddings.position_ids", "cls.*", *(() if self.spec.num_labels else ("pooler.*",)))

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """Where each checkpoint tensor goes, by its name."""
        rows = _WEIGHTS + (_HEAD if self.spec.num_labels else ())
        return expand_weights(self, rows, range(self.spec.num_layers))

    def forward(self, batch: EncoderBatch) -> Tensor:
        """Return hidden states [T, H]."""
        x = self.words(batch.input_ids) + self.positions(batch.positions) + self.types(batch.types)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def classify(self, hidden: Tensor) -> Tensor:
        """Return scores [S, labels] float32 for the hidden states [S, H] of inputs' first tokens."""
        assert self.pooler is not None
        assert self.classifier is not None
        scores = self.classifier(torch.tanh(self.pooler(hidden))).float()
        return scores.sigmoid() if self.spec.score_is_sigmoid else scores
