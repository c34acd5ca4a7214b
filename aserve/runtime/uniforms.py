"""The random number behind each sampled token: a pure function of (seed, position).

No generator and no state, so a request's tokens depend neither on its batch, slot or preemptions nor on the device
(numpy computes the numbers on the host for all of them). Called by the sampler.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return one float32 in [0, 1) per (seed, position) pair, with 24 random bits.

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; constants of Vigna's
    public-domain version): output number ``position`` of the stream that starts at the mixed seed. Mixing the seed
    first keeps nearby seeds, and seeds that differ by a multiple of the stride, apart.
    """
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA  # wraps modulo 2^64, as intended
    bits = _mix(_mix(seeds) + counters)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
