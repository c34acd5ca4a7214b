"""The sizes and switches of a model, read from a Hugging Face ``config.json``.

Everything else in aserve asks ``ModelSpec``; no other module knows the names of config keys. Defaults for absent keys
are those of transformers 5 (``models/*/configuration_*.py``), except that sizes which decide the shapes of weights
have none. Standard library only; called by the loader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from aserve.core.errors import ModelLoadError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


class _Family(NamedTuple):
    """What differs between the architectures' readings of ``config.json``."""

    num_kv_heads: int | None = None  # when the key is absent; None: as many as query heads
    head_dim: int | None = None  # when the key is absent; None: hidden size / query heads
    qkv_bias: bool | None = None  # None: attention_bias decides
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: Literal["none", "all", "by_layer"] = "none"


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(mlp_bias=None),
    "MistralForCausalLM": _Family(num_kv_heads=8, qkv_bias=False, output_bias=False, windows="all"),
    "Qwen2ForCausalLM": _Family(num_kv_heads=32, qkv_bias=True, output_bias=False, windows="by_layer"),
    "Qwen3ForCausalLM": _Family(num_kv_heads=32, head_dim=128, qk_norm=True, windows="by_layer"),
}
_DEFAULT_WINDOW = 4096  # of Mistral and Qwen, when the key is absent


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding and how it is stretched beyond the trained context.

    Attributes:
        rotary_dim: channels of a head that are rotated, even.
        theta: base of the wavelengths.
        factor: by how much the context is stretched (all types but default).
        original_max_positions: trained context (llama3, yarn).
        low_freq_factor, high_freq_factor: borders of the blend (llama3).
        beta_fast, beta_slow, truncate: borders of the ramp, in turns over the trained context (yarn).
        attention_factor: multiplies cos and sin (yarn).
    """

    rope_type: RopeType
    rotary_dim: int
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model is, independent of device, dtype and parallelism.

    Attributes:
        max_positions: longest sequence the positions are defined for (the model's context).
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
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
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
        reader = _Reader(config)
        architecture = _architecture(config)
        family = _FAMILIES[architecture]
        if reader.text("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelLoadError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only silu")
        hidden_size = reader.integer("hidden_size")
        num_heads = reader.integer("num_attention_heads")
        default_kv = num_heads if "num_key_value_heads" in config else family.num_kv_heads or num_heads
        num_kv_heads = reader.integer("num_key_value_heads", default_kv)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = _head_dim(reader, family, hidden_size, num_heads)
        max_positions = reader.integer("max_position_embeddings")
        rope, max_positions = _rope(reader, head_dim, max_positions)
        num_layers = reader.integer("num_hidden_layers")
        attention_bias = reader.boolean("attention_bias", False)
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
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope=rope,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=reader.boolean("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(reader, family, num_layers),
            eos_token_ids=_eos_token_ids(config.get("eos_token_id")),
            dtype=_dtype(reader),
            quant_method=_quant_method(reader),
        )


class _Reader:
    """Typed access to one JSON object; absent and null count the same, wrong types and values are errors."""

    def __init__(self, config: Mapping[str, Any], where: str = "") -> None:
        self.config = config
        self._where = where

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, value, "a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(name, value, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def child(self, name: str) -> _Reader | None:
        """An object; absent, null and empty count the same."""
        value: object = self.config.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return _Reader(cast("dict[str, Any]", value), f"{self._where}{name}.")

    def error(self, name: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"config.json: {self._where}{name} must be {wanted}, not {value!r}")

    def _get(self, name: str, default: object) -> object:
        value: object = self.config.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelLoadError(f"config.json: {self._where}{name} is missing")
        return default


def check_architecture(name: str) -> None:
    """Raise ModelLoadError, listing the known ones, unless the architecture is supported."""
    if name not in _FAMILIES:
        raise ModelLoadError(f"architecture {name} is not supported; known: {', '.join(_FAMILIES)}")


def _architecture(config: Mapping[str, Any]) -> str:
    names: object = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelLoadError("config.json: architectures is missing; known: " + ", ".join(_FAMILIES))
    for name in cast("list[object]", names):
        if isinstance(name, str) and name in _FAMILIES:
            return name
    check_architecture(", ".join(map(str, cast("list[object]", names))))
    raise AssertionError("no name of the list is known")


def _head_dim(reader: _Reader, family: _Family, hidden_size: int, num_heads: int) -> int:
    if reader.has("head_dim") or (family.head_dim is not None and "head_dim" not in reader.config):
        head_dim = reader.integer("head_dim", family.head_dim)
    else:
        if hidden_size % num_heads:
            raise ModelLoadError(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim must be even, not {head_dim}")
    return head_dim


def _rope(reader: _Reader, head_dim: int, max_positions: int) -> tuple[RopeSpec, int]:
    """Return the rope and the context it gives. Reads both ``rope_parameters`` and the older ``rope_scaling``."""
    params = reader.child("rope_scaling") or reader.child("rope_parameters") or _Reader({}, "rope_parameters.")
    if any(isinstance(value, dict) for value in params.config.values()):
        raise ModelLoadError("config.json: rope_parameters that differ between layer types are not supported")
    rope_type = params.text("rope_type", params.text("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise ModelLoadError(f"config.json: rope type {rope_type!r} is not supported; known: {', '.join(_ROPE_TYPES)}")
    partial = params.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelLoadError(f"config.json: partial_rotary_factor {partial:g} is not supported, only 1")
    theta = params.number("rope_theta", reader.number("rope_theta", 10000.0))
    common: dict[str, Any] = {"rope_type": rope_type, "rotary_dim": head_dim, "theta": theta}
    if rope_type == "default":
        return RopeSpec(**common), max_positions
    common["factor"] = factor = params.number("factor")
    if rope_type in ("linear", "dynamic"):
        # Below the trained context dynamic equals default; beyond it the angles would depend on the length of the
        # sequence, which cached keys cannot follow. So the context stays max_position_embeddings.
        return RopeSpec(**common), max_positions
    name = "original_max_position_embeddings"
    original = reader.integer(name, params.integer(name, max_positions))  # the outer one wins, as in transformers
    common["original_max_positions"] = original
    if rope_type == "llama3":
        low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
        if high <= low:
            raise params.error("high_freq_factor", high, f"greater than low_freq_factor {low:g}")
        return RopeSpec(**common, low_freq_factor=low, high_freq_factor=high), max_positions
    rope = RopeSpec(
        **common,
        beta_fast=params.number("beta_fast", 32.0),
        beta_slow=params.number("beta_slow", 1.0),
        truncate=params.boolean("truncate", True),
        attention_factor=_yarn_attention_factor(params, factor),
    )
    # Qwen's model cards add yarn to a config whose max_position_embeddings is still the trained context.
    return rope, max(max_positions, int(original * factor))


def _yarn_attention_factor(params: _Reader, factor: float) -> float:
    """YaRN (Peng et al. 2023), equation 22, with DeepSeek's mscale pair where given."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    default = scale(1.0)
    if params.has("mscale") and params.has("mscale_all_dim"):
        default = scale(params.number("mscale")) / scale(params.number("mscale_all_dim"))
    return params.number("attention_factor", default)


def _sliding_windows(reader: _Reader, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * num_layers
    null = "sliding_window" in reader.config and reader.config["sliding_window"] is None
    window = None if null else reader.integer("sliding_window", _DEFAULT_WINDOW)
    if family.windows == "all":
        return (window,) * num_layers
    if not reader.boolean("use_sliding_window", False):
        window = None
    layer_types: object = reader.config.get("layer_types")
    if layer_types is None and window is None:
        return (None,) * num_layers
    if layer_types is None:
        first = reader.config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise reader.error("max_window_layers", first, "a whole number")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = ("full_attention", "sliding_attention")
    types = cast("list[object]", layer_types) if isinstance(layer_types, list) else [layer_types]
    if any(kind not in kinds for kind in types):
        raise reader.error("layer_types", types, "a list of full_attention and sliding_attention")
    if len(types) != num_layers:
        raise ModelLoadError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    if window is None and "sliding_attention" in types:
        raise ModelLoadError("config.json: layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _eos_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelLoadError(f"config.json: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(cast("list[int]", ids))


def _dtype(reader: _Reader) -> str | None:
    for name in ("dtype", "torch_dtype"):
        if reader.has(name):
            return reader.text(name, "").removeprefix("torch.")
    return None


def _quant_method(reader: _Reader) -> str | None:
    quantization = reader.child("quantization_config")
    return None if quantization is None else quantization.text("quant_method", "of unknown kind")
