"""The bits of a mask are the same logits on a device as on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aserve.grammar import GrammarSlots
from aserve.runtime.token_masks import exclude, unpack


class Fixed(GrammarSlots):
    """Allows given bits."""

    def __init__(self, bits):
        super().__init__(None)
        self.bits = bits

    def matchers(self, slots):
        return [None] * len(slots)

    def allowed(self, matchers, positions, vocab_size):
        return self.bits


@pytest.mark.parametrize("count", [8, 61, 64, 131])
def test_unpacked_on_a_device(count):
    bits = np.random.default_rng(0).integers(0, 256, (3, -(-count // 8)), np.uint8)
    expected = np.unpackbits(bits, axis=1, count=count, bitorder="little") == 0
    assert (unpack(torch.from_numpy(bits), count).numpy() == expected).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [[1], [0, 2], [0, 1, 2]])
def test_rows_without_a_grammar_keep_their_logits(device, rows):
    bits = np.random.default_rng(1).integers(0, 256, (len(rows), 9), np.uint8)
    logits = torch.ones(3, 67, device=device)
    index = np.array(rows)
    exclude(logits, Fixed(bits), index, index, index)
    expected = np.ones((3, 67))
    expected[index] = np.where(np.unpackbits(bits, axis=1, count=67, bitorder="little") == 1, 1, -np.inf)
    assert (logits.cpu().numpy() == expected).all()
