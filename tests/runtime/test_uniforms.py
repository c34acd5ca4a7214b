"""Random numbers by seed and position."""

from __future__ import annotations

import numpy as np
import pytest

from aserve.runtime.uniforms import uniforms

MASK = 2**64 - 1
FROZEN = [0.8833107948303223, 0.4315279722213745, 0.5243459343910217, 0.3021389842033386]


def splitmix64_mix(z: int) -> int:
    """Vigna's splitmix64.c in Python integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def draw(seed: int, position: int) -> float:
    return float(uniforms(np.array([seed], np.uint64), np.array([position], np.int64))[0])


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 1000, 131_071])
def test_equals_splitmix64_in_integers(seed: int, position: int) -> None:
    z = splitmix64_mix((splitmix64_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
    assert draw(seed, position) == (z >> 40) / 2**24


def test_first_numbers_never_change() -> None:
    """A seed that a user noted must give the same text after an upgrade."""
    got = [draw(seed, position) for seed in (0, 7) for position in (0, 1)]
    assert got == FROZEN


def test_a_number_does_not_depend_on_its_batch() -> None:
    seeds = np.arange(64, dtype=np.uint64) * np.uint64(977)
    positions = np.arange(64, dtype=np.int64)[::-1].copy()
    assert uniforms(seeds, positions).tolist() == [draw(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_are_uniform_and_uncorrelated(along: str) -> None:
    n = 100_000
    counter = np.arange(n)
    fixed = np.zeros(n)
    seeds, positions = (fixed, counter) if along == "positions" else (counter, fixed)
    x = uniforms(seeds.astype(np.uint64), positions.astype(np.int64)).astype(np.float64)
    assert x.min() >= 0
    assert x.max() < 1
    histogram = np.histogram(x, bins=100, range=(0, 1))[0]
    chi2 = ((histogram - n / 100) ** 2 / (n / 100)).sum()
    assert 50 < chi2 < 160  # 99 degrees of freedom: outside with a chance below 1e-4
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.015


def test_seeds_one_stride_apart_are_not_shifted_copies() -> None:
    stride = 0x9E3779B97F4A7C15
    first = [draw(0, p) for p in range(1, 9)]
    second = [draw(stride, p) for p in range(8)]
    assert not set(first) & set(second)
