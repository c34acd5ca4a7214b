"""The table of angles for rotary position embedding (Su et al. 2021), with the known ways to stretch it.

The arithmetic is float32 in the order of transformers' ``modeling_rope_utils``: models were trained and are judged
with these roundings, and at position 100,000 another order moves an angle by 0.006.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aserve.core.rope_spec import RopeSpec


def build_cos_sin(rope: RopeSpec, num_positions: int, device: torch.device) -> Tensor:
    """Return the table [num_positions, rotary_dim] float32; the first half of a row is cos, the second sin.

    LongRoPE has one set of frequencies for sequences within the trained context and one for longer ones. Cached keys
    cannot change theirs, so ``num_positions``, the longest sequence to be computed, decides for all.
    """
    frequencies = rope_frequencies(rope, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32, device="cpu")[:, None] * frequencies[None, :]
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    if rope.attention_factor != 1.0:
        table *= rope.attention_factor
    return table.to(device)


def rope_frequencies(rope: RopeSpec, num_positions: int) -> Tensor:
    """Return radians per position [rotary_dim / 2] float32, of sequences of up to ``num_positions``."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / rope.rotary_dim
    if rope.rope_type == "longrope":
        factors = rope.long_factors if num_positions > rope.original_max_positions else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * rope.theta**exponents)
    return _STRETCHES[rope.rope_type](rope, 1.0 / (rope.theta**exponents), rope.theta**exponents)


def _default(rope: RopeSpec, frequencies: Tensor, periods: Tensor) -> Tensor:
    return frequencies


def _none(rope: RopeSpec, frequencies: Tensor, periods: Tensor) -> Tensor:
    return torch.zeros_like(frequencies)


def _linear(rope: RopeSpec, frequencies: Tensor, periods: Tensor) -> Tensor:
    return frequencies / rope.factor


def _llama3(rope: RopeSpec, frequencies: Tensor, periods: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > low_wavelength, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = ~(wavelengths < high_wavelength) * ~(wavelengths > low_wavelength)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeSpec, frequencies: Tensor, periods: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023), section 3.2: a ramp between kept and stretched, over the channels."""

    def channel_of(num_turns: float) -> float:
        """The channel pair that turns so often over the trained context."""
        turns = rope.original_max_positions / (num_turns * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel_of(rope.beta_fast), channel_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # as the paper's code: no division by zero
    channels = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - torch.clamp((channels - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * periods) * (1 - kept) + frequencies * kept


_STRETCHES: Mapping[str, Callable[[RopeSpec, Tensor, Tensor], Tensor]] = {
    "default": _default,
    "dynamic": _default,  # differs only beyond the trained context, which aserve does not go to
    "none": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
