"""Bytes of a model's weights on one device, from its sizes.

Knows the matrices of the decoder that all supported families share, and how ranks divide them; the formats of their
elements are ``quantization``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aserve.core.errors import ConfigError
from aserve.core.experts_spec import ExpertsSpec
from aserve.core.families import Block
from aserve.core.model_spec import ModelSpec
from aserve.planning.quantization import LM_HEAD, WeightFormat

_FLOAT_BYTES = 4  # tables of rotary angles are float32, and some norms
_INDEX_BYTES = 8
_NORMS_BY_LAYER: Mapping[Block, int] = {"pre": 2, "sandwich": 4, "post": 2, "parallel": 1}


class Matrix(NamedTuple):
    """One linear layer's matrix on one rank; ``layers`` have one of the kind, under names with ``*``.

    ``copies`` are of each layer's experts. A matrix of ``can_be_quantized`` off stays in the model's dtype.
    """

    name: str
    rows: int
    columns: int
    has_bias: bool
    layers: Sequence[int]
    copies: int = 1
    can_be_quantized: bool = True


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
            if weights is not None and matrix.can_be_quantized and weights.covers(name):
                quantized += matrix.copies * weights.num_bytes(matrix.rows, matrix.columns)
            else:
                plain += matrix.copies * matrix.rows * matrix.columns * dtype_bytes
            plain += matrix.copies * matrix.rows * dtype_bytes * matrix.has_bias
    plain += spec.vocab_size // ranks * spec.hidden_size * dtype_bytes
    plain += _num_norm_weights(spec) * (_FLOAT_BYTES if spec.norm_unit_offset else dtype_bytes)
    plain += spec.num_layers * _num_qk_norm_weights(spec, ranks) * _qk_norm_bytes(spec, dtype_bytes)
    if spec.experts is not None:
        plain += sum(spec.experts.by_layer) * spec.experts.num_experts * _INDEX_BYTES  # the experts' numbers
    num_tables = len({spec.rope, spec.window_rope})
    return WeightBytes(
        quantized=quantized, plain=plain, tables=num_tables * max_model_len * spec.rope.rotary_dim * _FLOAT_BYTES
    )


def num_parameters(spec: ModelSpec) -> int:
    """Return how many weights the model has, whatever form quantisation keeps them in."""
    matrices = sum(len(m.layers) * m.copies * m.rows * (m.columns + m.has_bias) for m in _matrices(spec, 1))
    norms = _num_norm_weights(spec) + spec.num_layers * _num_qk_norm_weights(spec, 1)
    return matrices + spec.vocab_size * spec.hidden_size + norms


def num_active_parameters(spec: ModelSpec) -> int:
    """Return how many of the weights compute one token: all but those of experts that were not chosen."""
    experts = spec.experts
    if experts is None:
        return num_parameters(spec)
    by_expert = 3 * spec.hidden_size * experts.intermediate_size
    idle = (experts.num_experts - experts.num_active) * sum(experts.by_layer)
    return num_parameters(spec) - idle * by_expert


def num_layer_parameters(spec: ModelSpec) -> int:
    """Return how many weights every token of a prompt is multiplied with: those of the layers, but not of the head."""
    active = spec.experts.num_active if spec.experts is not None else 1
    return sum(
        len(m.layers) * min(m.copies, active) * m.rows * m.columns for m in _matrices(spec, 1) if m.name != LM_HEAD
    )


def _num_norm_weights(spec: ModelSpec) -> int:
    num_norms = spec.num_layers * _NORMS_BY_LAYER[spec.block] + 1
    return num_norms * spec.hidden_size * (2 if spec.norm == "layer_with_bias" else 1)


def _num_qk_norm_weights(spec: ModelSpec, ranks: int) -> int:
    """Of one layer on one rank."""
    if spec.qk_norm == "none":
        return 0
    if spec.qk_norm == "head":
        return 2 * spec.head_dim
    return (spec.num_heads // ranks + max(1, spec.num_kv_heads // ranks)) * spec.head_dim


def _qk_norm_bytes(spec: ModelSpec, dtype_bytes: int) -> int:
    return _FLOAT_BYTES if spec.norm_unit_offset or spec.qk_norm == "layer_by_head" else dtype_bytes


def _matrices(spec: ModelSpec, ranks: int) -> Iterator[Matrix]:
    """Every linear layer as one rank holds it; KV heads are held by several ranks where there are more ranks."""
    hidden, every = spec.hidden_size, range(spec.num_layers)
    queries = spec.num_heads // ranks * spec.head_dim
    keys = max(1, spec.num_kv_heads // ranks) * spec.head_dim
    layer = "model.layers.*."
    yield Matrix(layer + "self_attn.q_proj", queries, hidden, spec.qkv_bias, every)
    yield Matrix(layer + "self_attn.k_proj", keys, hidden, spec.qkv_bias, every)
    yield Matrix(layer + "self_attn.v_proj", keys, hidden, spec.qkv_bias, every)
    yield Matrix(layer + "self_attn.o_proj", hidden, queries, spec.output_bias, every)
    experts = spec.experts
    dense = [n for n in every if experts is None or not experts.by_layer[n]]
    yield from _mlp(layer + "mlp", spec, spec.intermediate_size // ranks, dense)
    if experts is not None:
        sparse = [n for n in every if experts.by_layer[n]]
        yield from _mixture(layer + "mlp", spec, experts, sparse, ranks=ranks)
    if not spec.tie_word_embeddings:
        yield Matrix(LM_HEAD, spec.vocab_size // ranks, hidden, False, (0,))


def _mlp(name: str, spec: ModelSpec, inner: int, layers: Sequence[int], copies: int = 1) -> Iterator[Matrix]:
    bias = spec.mlp_bias
    if spec.gated_mlp:
        yield Matrix(f"{name}.gate_proj", inner, spec.hidden_size, bias, layers, copies)
    yield Matrix(f"{name}.up_proj", inner, spec.hidden_size, bias, layers, copies)
    yield Matrix(f"{name}.down_proj", spec.hidden_size, inner, bias, layers, copies)


def _mixture(
    name: str, spec: ModelSpec, experts: ExpertsSpec, layers: Sequence[int], *, ranks: int
) -> Iterator[Matrix]:
    inner = experts.intermediate_size // ranks
    yield from _mlp(f"{name}.experts", spec, inner, layers, experts.num_experts)
    router = Matrix(f"{name}.gate", experts.num_experts, spec.hidden_size, False, layers, can_be_quantized=False)
    yield router
    if experts.shared_size:
        yield from _mlp(f"{name}.shared_expert", spec, experts.shared_size // ranks, layers)
        yield router._replace(name=f"{name}.shared_expert_gate", rows=1)


def _names(matrix: Matrix) -> Iterator[str]:
    for layer in matrix.layers:
        yield matrix.name.replace("*", str(layer))


def _check_ranks(spec: ModelSpec, ranks: int) -> None:
    sizes = {
        "query heads": spec.num_heads,
        "rows of the vocabulary": spec.vocab_size,
        "channels of the feed-forward layers": spec.intermediate_size,
    }
    if spec.experts is not None:
        sizes["channels of an expert"] = spec.experts.intermediate_size
        sizes["channels of the expert that all share"] = spec.experts.shared_size
    for name, count in sizes.items():
        if count % ranks:
            raise ConfigError(f"--tp {ranks} does not divide the model's {count} {name}")
    if spec.num_kv_heads % ranks and ranks % spec.num_kv_heads:
        raise ConfigError(f"--tp {ranks} does not divide the model's {spec.num_kv_heads} KV heads")
