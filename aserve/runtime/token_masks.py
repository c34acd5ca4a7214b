"""The rows of a step that keep to a grammar: their masks, applied to the logits.

Joins the matchers, which know neither torch nor a device, to the sampler's tensors. The masks are made on the host
while the device computes the step, and applied outside its graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.grammar import GrammarSlots, Matcher
from aserve.runtime.transfer import to_device

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ConstrainedRows:
    """Rows of the sampled tokens, and the matchers that are to take them once they are known."""

    rows: tuple[int, ...]
    matchers: tuple[Matcher, ...]


def exclude(logits: Tensor, grammars: GrammarSlots, rows: Ints, slots: Ints, positions: Ints) -> ConstrainedRows:
    """Set the logits of what the grammars of ``rows`` [n] do not allow to -inf, in place.

    ``logits`` [S', V] float32; ``slots`` and ``positions`` [n] belong to the rows.
    """
    matchers = grammars.matchers(slots.tolist())
    allowed = grammars.allowed(matchers, positions.tolist(), logits.shape[1])
    if logits.device.type == "cpu":
        excluded = torch.from_numpy(np.unpackbits(~allowed, axis=1, count=logits.shape[1], bitorder="little"))
        for place, row in enumerate(rows.tolist()):
            logits[row].masked_fill_(excluded[place].view(torch.bool), -torch.inf)
    else:
        bits, sent_rows = to_device((allowed, rows), logits.device)
        excluded = unpack(bits, logits.shape[1])
        if len(rows) < len(logits):  # bytes for all rows are less than copies of some rows' logits
            of_all = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            of_all[sent_rows] = excluded
            excluded = of_all
        logits.masked_fill_(excluded, -torch.inf)
    return ConstrainedRows(tuple(rows.tolist()), tuple(matchers))


def unpack(bits: Tensor, count: int) -> Tensor:
    """Return where bits are 0: ``bits`` [n, B] uint8, lowest first, as [n, count] bool."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(2) >> places) & 1).view(len(bits), -1)[:, :count] == 0
