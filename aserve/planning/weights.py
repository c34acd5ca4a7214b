"""Bytes of a model's weights on one device, from its sizes.

Knows the matrices of the decoder that all supported families share, and how ranks divide them; the formats of their
elements are ``quantization``'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from aserve.core.errors import ConfigError
from aserve.core.model_spec import ModelSpec
from aserve.planning.quantization import LM_HEAD, WeightFormat

_FLOAT_BYTES = 4  # tables of rotary angles are float32, and norms that scale by 1 + weight


class Matrix(NamedTuple):
    """One linear layer's matrix on one rank; ``copies`` layers have one of the kind, under names with ``*``."""

    name: str
    rows: int
    columns: int
    has_bias: bool
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Where the bytes are.

    Attributes:
        quantized: matrices of linear layers in the checkpoint's own format, with scales; 0 for plain weights.
        plain: everything in the model's dtype: embeddings, head, norms, biases, matrices that are not quantised.
        tables: of rotary angles, up to the longest request.
    """

    quantized: int
    plain: int
    tables: int

    @property
    def total(self) -> int:
        return self.quantized + self.plain + self.tables


def weight_bytes(
    spec: ModelSpec, *, dtype_bytes: int, max_model_len: int, ranks: int = 1, weights: WeightFormat | None = None
) -> WeightBytes:
    """Return the bytes on each of ``ranks`` devices. Raises ConfigError when the model cannot be cut so."""
    _check_ranks(spec, ranks)
    quantized = plain = 0
    for matrix in _matrices(spec, ranks):
        for name in _names(matrix):
            if weights is not None and weights.covers(name):
                quantized += weights.num_bytes(matrix.rows, matrix.columns)
            else:
                plain += matrix.rows * matrix.columns * dtype_bytes
            plain += matrix.rows * dtype_bytes * matrix.has_bias
    plain += spec.vocab_size // ranks * spec.hidden_size * dtype_bytes
    plain += _num_norm_weights(spec) * (_FLOAT_BYTES if spec.norm_unit_offset else dtype_bytes)
    num_tables = len({spec.rope, spec.window_rope})
    return WeightBytes(
        quantized=quantized, plain=plain, tables=num_tables * max_model_len * spec.rope.rotary_dim * _FLOAT_BYTES
    )


def num_parameters(spec: ModelSpec) -> int:
    """Return how many weights the model has, whatever form quantisation keeps them in."""
    matrices = sum(m.copies * m.rows * (m.columns + m.has_bias) for m in _matrices(spec, 1))
    return matrices + spec.vocab_size * spec.hidden_size + _num_norm_weights(spec)


def num_layer_parameters(spec: ModelSpec) -> int:
    """Return how many weights every token of a prompt is multiplied with: those of the layers, but not of the head."""
    return sum(m.copies * m.rows * m.columns for m in _matrices(spec, 1) if m.name != LM_HEAD)


def _num_norm_weights(spec: ModelSpec) -> int:
    by_layer = (4 if spec.architecture.startswith("Gemma") else 2) * spec.hidden_size
    return spec.num_layers * (by_layer + 2 * spec.head_dim * spec.qk_norm) + spec.hidden_size


def _matrices(spec: ModelSpec, ranks: int) -> Iterator[Matrix]:
    """Every linear layer as one rank holds it; KV heads are held by several ranks where there are more ranks."""
    hidden, inner = spec.hidden_size, spec.intermediate_size // ranks
    queries = spec.num_heads // ranks * spec.head_dim
    keys = max(1, spec.num_kv_heads // ranks) * spec.head_dim
    layer, many = "model.layers.*.", spec.num_layers
    yield Matrix(layer + "self_attn.q_proj", queries, hidden, spec.qkv_bias, many)
    yield Matrix(layer + "self_attn.k_proj", keys, hidden, spec.qkv_bias, many)
    yield Matrix(layer + "self_attn.v_proj", keys, hidden, spec.qkv_bias, many)
    yield Matrix(layer + "self_attn.o_proj", hidden, queries, spec.output_bias, many)
    yield Matrix(layer + "mlp.gate_proj", inner, hidden, spec.mlp_bias, many)
    yield Matrix(layer + "mlp.up_proj", inner, hidden, spec.mlp_bias, many)
    yield Matrix(layer + "mlp.down_proj", hidden, inner, spec.mlp_bias, many)
    if not spec.tie_word_embeddings:
        yield Matrix(LM_HEAD, spec.vocab_size // ranks, hidden, False, 1)


def _names(matrix: Matrix) -> Iterator[str]:
    for layer in range(matrix.copies):
        yield matrix.name.replace("*", str(layer))


def _check_ranks(spec: ModelSpec, ranks: int) -> None:
    sizes = {
        "query heads": spec.num_heads,
        "rows of the vocabulary": spec.vocab_size,
        "channels of the feed-forward layers": spec.intermediate_size,
    }
    for name, count in sizes.items():
        if count % ranks:
            raise ConfigError(f"--tp {ranks} does not divide the model's {count} {name}")
    if spec.num_kv_heads % ranks and ranks % spec.num_kv_heads:
        raise ConfigError(f"--tp {ranks} does not divide the model's {spec.num_kv_heads} KV heads")
