"""Rotary position embedding as a model's ``config.json`` describes it.

Defaults for absent keys are those of transformers 5 (``modeling_rope_utils.py``). Called by ``model_spec``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from aserve.core.config_reader import ConfigReader
from aserve.core.errors import ModelLoadError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


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


def read_rope(reader: ConfigReader, head_dim: int, max_positions: int) -> tuple[RopeSpec, int]:
    """Return the rope and the context it gives. Reads both ``rope_parameters`` and the older ``rope_scaling``."""
    params = reader.child("rope_scaling") or reader.child("rope_parameters") or reader.empty("rope_parameters")
    if any(isinstance(value, dict) for value in params.config.values()):
        raise ModelLoadError("config.json: rope_parameters that differ between layer types are not supported")
    return _read_params(reader, params, head_dim, max_positions, theta=reader.number("rope_theta", 10000.0))


def read_ropes_by_layer_type(reader: ConfigReader, head_dim: int, max_positions: int) -> tuple[RopeSpec, RopeSpec, int]:
    """Return Gemma 3's ropes, of layers that see everything and of those with a window, and the context.

    Reads ``rope_parameters`` by layer type, and the older ``rope_theta``, ``rope_scaling`` and
    ``rope_local_base_freq``.
    """
    nested = reader.child("rope_parameters") or reader.empty("rope_parameters")
    others = [name for name in nested.config if name not in ("full_attention", "sliding_attention")]
    if others:
        raise nested.error(others[0], nested.config[others[0]], "absent beside full_attention and sliding_attention")
    params = reader.child("rope_scaling") or nested.child("full_attention") or nested.empty("full_attention")
    theta = reader.number("rope_theta", 1000000.0)
    rope, context = _read_params(reader, params, head_dim, max_positions, theta=theta)
    params = nested.child("sliding_attention") or nested.empty("sliding_attention")
    theta = reader.number("rope_local_base_freq", 10000.0)
    window_rope, _ = _read_params(reader, params, head_dim, max_positions, theta=theta)
    return rope, window_rope, context


def _read_params(
    reader: ConfigReader, params: ConfigReader, head_dim: int, max_positions: int, *, theta: float
) -> tuple[RopeSpec, int]:
    rope_type = params.text("rope_type", params.text("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise ModelLoadError(f"config.json: rope type {rope_type!r} is not supported; known: {', '.join(_ROPE_TYPES)}")
    partial = params.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelLoadError(f"config.json: partial_rotary_factor {partial:g} is not supported, only 1")
    theta = params.number("rope_theta", theta)
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


def _yarn_attention_factor(params: ConfigReader, factor: float) -> float:
    """YaRN (Peng et al. 2023), equation 22, with DeepSeek's mscale pair where given."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    default = scale(1.0)
    if params.has("mscale") and params.has("mscale_all_dim"):
        default = scale(params.number("mscale")) / scale(params.number("mscale_all_dim"))
    return params.number("attention_factor", default)
