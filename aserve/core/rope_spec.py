"""Rotary position embedding as a model's ``config.json`` describes it.

Defaults for absent keys are those of transformers 5 (``modeling_rope_utils.py``). Called by ``model_spec``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from aserve.core.config_reader import ConfigReader
from aserve.core.errors import ModelLoadError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding and how it is stretched beyond the trained context.

    Attributes:
        rope_type: "none" rotates nothing, for layers without positions.
        rotary_dim: channels of a head that are rotated, even; the first ones.
        theta: base of the wavelengths.
        factor: by how much the context is stretched (all types but default).
        original_max_positions: trained context (dynamic, llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: borders of the blend (llama3).
        beta_fast, beta_slow, truncate: borders of the ramp, in turns over the trained context (yarn).
        attention_factor: multiplies cos and sin (yarn, longrope).
        short_factors, long_factors: what divides each frequency within and beyond the trained context (longrope).
        interleaved: whether channels 2i and 2i + 1 are rotated together, and not i and i + half.
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    interleaved: bool = False


def read_rope(
    reader: ConfigReader, head_dim: int, max_positions: int, *, partial: bool = False, interleaved: bool = False
) -> tuple[RopeSpec, int]:
    """Return the rope and the context it gives. Reads both ``rope_parameters`` and the older ``rope_scaling``.

    ``partial``: whether the family's code rotates only a part of a head where the config says so.
    """
    params = reader.child("rope_scaling") or reader.child("rope_parameters") or reader.empty("rope_parameters")
    if any(isinstance(value, dict) for value in params.config.values()):
        raise ModelLoadError("config.json: rope_parameters that differ between layer types are not supported")
    theta = reader.number("rope_theta", 10000.0)
    rotary_dim = _rotary_dim(reader, params, head_dim, partial=partial)
    rope, context = _read_params(reader, params, rotary_dim, max_positions, theta=theta)
    return replace(rope, interleaved=interleaved), context


def without_rope(rope: RopeSpec) -> RopeSpec:
    """Return the rope of layers without positions, in a model that has ``rope`` elsewhere."""
    return RopeSpec(rope_type="none", rotary_dim=rope.rotary_dim, theta=rope.theta, interleaved=rope.interleaved)


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
    rotary_dim = _rotary_dim(reader, params, head_dim, partial=False)
    rope, context = _read_params(reader, params, rotary_dim, max_positions, theta=theta)
    params = nested.child("sliding_attention") or nested.empty("sliding_attention")
    theta = reader.number("rope_local_base_freq", 10000.0)
    rotary_dim = _rotary_dim(reader, params, head_dim, partial=False)
    window_rope, _ = _read_params(reader, params, rotary_dim, max_positions, theta=theta)
    return rope, window_rope, context


def _rotary_dim(reader: ConfigReader, params: ConfigReader, head_dim: int, *, partial: bool) -> int:
    share = params.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    if share != 1.0 and not partial:
        raise ModelLoadError(f"config.json: partial_rotary_factor {share:g} is not supported, only 1")
    rotary_dim = int(head_dim * share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelLoadError(
            f"config.json: partial_rotary_factor {share:g} of {head_dim} channels must give an even number of them"
        )
    return rotary_dim


def _read_params(
    reader: ConfigReader, params: ConfigReader, rotary_dim: int, max_positions: int, *, theta: float
) -> tuple[RopeSpec, int]:
    name = params.text("rope_type", params.text("type", "default"))
    name = _OLD_NAMES.get(name, name)
    if name == "yarn" and params.has("long_factor"):
        name = "longrope"  # as the first configs of Phi-3 have it
    if name not in _READERS:
        raise ModelLoadError(f"config.json: rope type {name!r} is not supported; known: {', '.join(_READERS)}")
    base = RopeSpec(rope_type="default", rotary_dim=rotary_dim, theta=params.number("rope_theta", theta))
    return _READERS[name](reader, params, base, max_positions)


def _default(reader: ConfigReader, params: ConfigReader, base: RopeSpec, max_positions: int) -> tuple[RopeSpec, int]:
    return base, max_positions


def _linear(reader: ConfigReader, params: ConfigReader, base: RopeSpec, max_positions: int) -> tuple[RopeSpec, int]:
    return replace(base, rope_type="linear", factor=params.number("factor")), max_positions


def _dynamic(reader: ConfigReader, params: ConfigReader, base: RopeSpec, max_positions: int) -> tuple[RopeSpec, int]:
    # Below the trained context dynamic equals default; beyond it the angles would depend on the length of the
    # sequence, which cached keys cannot follow. So the context stays max_position_embeddings.
    return replace(base, rope_type="dynamic", factor=params.number("factor")), max_positions


def _llama3(reader: ConfigReader, params: ConfigReader, base: RopeSpec, max_positions: int) -> tuple[RopeSpec, int]:
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    if high <= low:
        raise params.error("high_freq_factor", high, f"greater than low_freq_factor {low:g}")
    rope = replace(
        base,
        rope_type="llama3",
        factor=params.number("factor"),
        original_max_positions=_original(reader, params, max_positions),
        low_freq_factor=low,
        high_freq_factor=high,
    )
    return rope, max_positions


def _yarn(reader: ConfigReader, params: ConfigReader, base: RopeSpec, max_positions: int) -> tuple[RopeSpec, int]:
    factor, original = params.number("factor"), _original(reader, params, max_positions)
    rope = replace(
        base,
        rope_type="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=params.number("beta_fast", 32.0),
        beta_slow=params.number("beta_slow", 1.0),
        truncate=params.boolean("truncate", True),
        attention_factor=_yarn_attention_factor(params, factor),
    )
    # Qwen's model cards add yarn to a config whose max_position_embeddings is still the trained context.
    return rope, max(max_positions, int(original * factor))


def _longrope(reader: ConfigReader, params: ConfigReader, base: RopeSpec, max_positions: int) -> tuple[RopeSpec, int]:
    original = _original(reader, params, max_positions)
    factor = params.number("factor", max_positions / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    rope = replace(
        base,
        rope_type="longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=params.number("attention_factor", scale),
        short_factors=params.numbers("short_factor", base.rotary_dim // 2),
        long_factors=params.numbers("long_factor", base.rotary_dim // 2),
    )
    return rope, max_positions


_READERS: Mapping[str, Callable[[ConfigReader, ConfigReader, RopeSpec, int], tuple[RopeSpec, int]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
_OLD_NAMES: Mapping[str, str] = {"su": "longrope"}


def _original(reader: ConfigReader, params: ConfigReader, max_positions: int) -> int:
    name = "original_max_position_embeddings"
    return reader.integer(name, params.integer(name, max_positions))  # the outer one wins, as in transformers


def _yarn_attention_factor(params: ConfigReader, factor: float) -> float:
    """YaRN (Peng et al. 2023), equation 22, with DeepSeek's mscale pair where given."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    default = scale(1.0)
    if params.has("mscale") and params.has("mscale_all_dim"):
        default = scale(params.number("mscale")) / scale(params.number("mscale_all_dim"))
    return params.number("attention_factor", default)
