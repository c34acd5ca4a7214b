"""The sizes and switches of a model, read from a Hugging Face ``config.json``.

Everything else in aserve asks ``ModelSpec``; no other module knows the names of config keys. Defaults for absent keys
are those of transformers 5 (``models/*/configuration_*.py``), except that sizes which decide the shapes of weights
have none. Standard library only; called by the loader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from aserve.core.config_reader import ConfigReader
from aserve.core.errors import ModelLoadError
from aserve.core.experts_spec import ExpertsSpec, read_experts
from aserve.core.families import FAMILIES, Activation, Block, Family, Norm, QkNorm
from aserve.core.rope_spec import RopeSpec, read_rope, read_ropes_by_layer_type, without_rope

_OUTER_KEYS = ("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Keys that a config with a ``text_config`` has beside it; they count before those inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model is, independent of device, dtype and parallelism.

    Attributes:
        max_positions: longest sequence the positions are defined for (the model's context).
        rope, window_rope: of layers that see everything, and of those with a window; often the same.
        block, norm, qk_norm: see their types in ``families``.
        norm_eps: of all norms.
        norm_unit_offset: whether norms scale by 1 + weight, before they round.
        gated_mlp: whether the MLP multiplies two projections of its input.
        embedding_scale: what embeddings are multiplied by, rounded to the dtype of activations.
        residual_scale: what attention's and the MLP's outputs are multiplied by before they are added.
        logit_scale: what logits are multiplied by.
        attention_scale: what products of queries and keys are multiplied by.
        attention_softcap: bounds attention scores s to c * tanh(s / c); None: unbounded.
        logit_softcap: the same for logits.
        grouped_qkv: whether the stored projection has the rows of each KV head together: its queries, key and value.
        experts: of layers whose MLP is a choice of several; None: there are none.
        sliding_windows: per layer, how many positions a query sees including its own; None: all.
        dtype: name of the checkpoint's dtype ("bfloat16"), None when the config does not say.
        quant_method: name of the quantisation of the stored weights ("awq"); None: plain.
        eos_token_ids: end-of-text ids of config.json alone; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    block: Block
    norm: Norm
    norm_eps: float
    norm_unit_offset: bool
    activation: Activation
    gated_mlp: bool
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    rope: RopeSpec
    window_rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm
    grouped_qkv: bool
    experts: ExpertsSpec | None
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    quant_method: str | None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read ``config.json`` of a model folder. Raises ModelLoadError if it is absent, damaged or unsupported."""
        path = folder / "config.json"
        try:
            config: object = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelLoadError(f"cannot read config.json in {folder}: {error.strerror or error}") from None
        except ValueError as error:
            raise ModelLoadError(f"config.json in {folder} is not valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise ModelLoadError(f"config.json in {folder} is not a JSON object")
        return cls.from_hf(cast("dict[str, Any]", config))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a parsed ``config.json``. Raises ModelLoadError that names the field at fault."""
        config = _with_head(config)
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        reader = _open(config, architecture, family)
        hidden_size = reader.integer("hidden_size")
        num_heads = reader.integer("num_attention_heads")
        num_kv_heads = reader.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = _head_dim(reader, hidden_size, num_heads)
        num_layers = reader.integer("num_hidden_layers")
        rope, window_rope, max_positions = _ropes(reader, family, head_dim)
        return cls(
            architecture=architecture,
            vocab_size=reader.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            block=family.block,
            norm=family.norm,
            norm_eps=reader.number(family.eps_key, 1e-6),
            norm_unit_offset=family.gemma,
            activation=_activation(reader, family),
            gated_mlp=family.gated,
            rope=rope,
            window_rope=window_rope,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
            qkv_bias=_bias(reader, family.qkv_bias),
            output_bias=_bias(reader, family.output_bias),
            mlp_bias=_bias(reader, family.mlp_bias),
            qk_norm=_qk_norm(reader, family),
            grouped_qkv=family.grouped_qkv,
            experts=read_experts(reader, family.experts, num_layers),
            attention_softcap=reader.optional_number("attn_logit_softcapping") if family.gemma else None,
            logit_softcap=reader.optional_number("final_logit_softcapping") if family.gemma else None,
            sliding_windows=_sliding_windows(reader, family, num_layers),
            eos_token_ids=_eos_token_ids(reader.config.get("eos_token_id")),
            dtype=_dtype(reader),
            quant_method=_quant_method(reader),
            **_scales(reader, family, hidden_size, head_dim),
        )


def check_architecture(name: str) -> None:
    """Raise ModelLoadError, listing the known ones, unless the architecture is supported."""
    if name not in FAMILIES:
        raise ModelLoadError(f"architecture {name} is not supported; known: {', '.join(FAMILIES)}")


def _with_head(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A decoder without a head, as models for vectors are saved, has the same layers; its embedding stands for one."""
    match config.get("architectures"):
        case [str(name)] if name.endswith("Model") and f"{name.removesuffix('Model')}ForCausalLM" in FAMILIES:
            whole = f"{name.removesuffix('Model')}ForCausalLM"
            return {**config, "architectures": [whole], "tie_word_embeddings": True}
        case _:
            return config


def _architecture(config: Mapping[str, Any]) -> str:
    names: object = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelLoadError("config.json: architectures is missing; known: " + ", ".join(FAMILIES))
    for name in cast("list[object]", names):
        if isinstance(name, str) and name in FAMILIES:
            return name
    check_architecture(", ".join(map(str, cast("list[object]", names))))
    raise AssertionError("no name of the list is known")


def _open(config: Mapping[str, Any], architecture: str, family: Family) -> ConfigReader:
    """Return a reader of the text model's settings, defaults filled in; refuses what no family here computes."""
    outer = ConfigReader(config)
    text = outer.child("text_config") if architecture.endswith("ForConditionalGeneration") else None
    if text is None:
        reader = ConfigReader({**family.defaults, **config})
    else:
        beside = {name: config[name] for name in _OUTER_KEYS if outer.has(name)}
        reader = ConfigReader({**family.defaults, **text.config, **beside}, "text_config.")
    if family.gemma and reader.boolean("use_bidirectional_attention", False):
        raise ModelLoadError("config.json: use_bidirectional_attention is not supported")
    if family.two_ropes and reader.has("attn_logit_softcapping"):
        raise ModelLoadError(f"config.json: attn_logit_softcapping is not supported in {architecture}")
    return reader


def _ropes(reader: ConfigReader, family: Family, head_dim: int) -> tuple[RopeSpec, RopeSpec, int]:
    """Return the ropes of layers that see everything and of those with a window, and the context."""
    max_positions = reader.integer("max_position_embeddings")
    if family.two_ropes:
        return read_ropes_by_layer_type(reader, head_dim, max_positions)
    rope, max_positions = read_rope(
        reader, head_dim, max_positions, partial=family.partial_rope, interleaved=family.interleaved_rope
    )
    return without_rope(rope) if family.window_rope_only else rope, rope, max_positions


def _scales(reader: ConfigReader, family: Family, hidden_size: int, head_dim: int) -> dict[str, float]:
    """Return embedding_scale, residual_scale, attention_scale and logit_scale."""
    if family.multipliers:
        return {
            "embedding_scale": reader.number("embedding_multiplier", 1.0),
            "residual_scale": reader.number("residual_multiplier", 1.0),
            "attention_scale": reader.number("attention_multiplier", 1.0),
            "logit_scale": 1.0 / reader.number("logits_scaling", 1.0),
        }
    return {
        "embedding_scale": hidden_size**0.5 if family.gemma else 1.0,
        "residual_scale": 1.0,
        "attention_scale": (reader.number("query_pre_attn_scalar") if family.gemma else head_dim) ** -0.5,
        "logit_scale": reader.number("logit_scale") if family.logit_scale else 1.0,
    }


def _bias(reader: ConfigReader, key: bool | str) -> bool:
    return key if isinstance(key, bool) else reader.boolean(key, False)


def _qk_norm(reader: ConfigReader, family: Family) -> QkNorm:
    if family.block == "parallel" and reader.boolean("use_qk_norm", False):
        return "layer_by_head"
    return family.qk_norm


def _activation(reader: ConfigReader, family: Family) -> Activation:
    key, known = family.activation_key, family.activations
    name = reader.text(key, next(iter(known)))
    if name not in known:
        raise ModelLoadError(f"config.json: {key} {name!r} is not supported, only {next(iter(known))}")
    return known[name]


def _head_dim(reader: ConfigReader, hidden_size: int, num_heads: int) -> int:
    if reader.has("head_dim"):
        head_dim = reader.integer("head_dim")
    else:
        if hidden_size % num_heads:
            raise ModelLoadError(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim must be even, not {head_dim}")
    return head_dim


def _sliding_windows(reader: ConfigReader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * num_layers
    has_switch = family.windows in ("by_layer", "all_if_used")
    is_used = reader.has("sliding_window") and (not has_switch or reader.boolean("use_sliding_window", False))
    window = reader.integer("sliding_window") if is_used else None
    if family.windows in ("all", "all_if_used"):
        return (window,) * num_layers
    layer_types: object = reader.config.get("layer_types")
    if layer_types is None:
        return _windows_by_number(reader, family, num_layers, window)
    kinds = ("full_attention", "sliding_attention")
    types = cast("list[object]", layer_types) if isinstance(layer_types, list) else [layer_types]
    if any(kind not in kinds for kind in types):
        raise reader.error("layer_types", types, "a list of full_attention and sliding_attention")
    if len(types) != num_layers:
        raise ModelLoadError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    if window is None and "sliding_attention" in types:
        raise ModelLoadError("config.json: layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _windows_by_number(
    reader: ConfigReader, family: Family, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    """Return the windows where the config does not list its layers' types."""
    if family.windows == "pattern":  # every so many layers, one sees everything
        period = reader.integer("sliding_window_pattern")
        if window is None:
            raise reader.error("sliding_window", None, "a positive whole number")
        return tuple(None if (layer + 1) % period == 0 else window for layer in range(num_layers))
    if window is None:
        return (None,) * num_layers
    first = reader.config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise reader.error("max_window_layers", first, "a whole number")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _eos_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelLoadError(f"config.json: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(cast("list[int]", ids))


def _dtype(reader: ConfigReader) -> str | None:
    for name in ("dtype", "torch_dtype"):
        if reader.has(name):
            return reader.text(name, "").removeprefix("torch.")
    return None


def _quant_method(reader: ConfigReader) -> str | None:
    quantization = reader.child("quantization_config")
    return None if quantization is None else quantization.text("quant_method", "of unknown kind")
