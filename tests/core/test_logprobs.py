"""Packed alternatives read like a sequence of pairs."""

from __future__ import annotations

import sys

import pytest

from aserve.core.logprobs import PackedLogprobs


def test_pairs_come_back() -> None:
    packed = PackedLogprobs([7, 0, 152191], [-0.25, -1.5, -30.0])
    assert list(packed) == [(7, -0.25), (0, -1.5), (152191, -30.0)]
    assert len(packed) == 3
    assert packed[2] == packed[-1] == (152191, -30.0)
    assert packed[:2] == ((7, -0.25), (0, -1.5))
    with pytest.raises(IndexError):
        packed[3]
    assert list(PackedLogprobs([], [])) == []


def test_a_pair_takes_eight_bytes() -> None:
    packed = PackedLogprobs(range(20), [-float(n) for n in range(20)])
    assert sys.getsizeof(packed._packed) < 20 * 8 + 64
