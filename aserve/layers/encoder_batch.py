"""The tensors of one step of an encoder: whole inputs, flattened, and how attention pads them.

Built by the runtime once per step, read by every layer. Letters: T tokens of the step, S inputs of a group, L longest
of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class PaddedGroup(NamedTuple):
    """Inputs of similar length, as attention sees them: padded to the longest.

    Attributes:
        tokens: [S, L] int64, places among the step's tokens; padding repeats one of the input's own.
        mask: [S, 1, 1, L] bool, False for padding; None where there is none.
        kept: [t] int64, places in the flattened [S * L] of what is no padding, in the order of the tokens.
        places: [t] int64, places of these among the step's tokens.
    """

    tokens: Tensor
    mask: Tensor | None
    kept: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """The inputs of one step.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, each token's place in its input.
        types: [T] int64, 1 for tokens of the second text of a pair.
        groups: all inputs, each in one group.
    """

    input_ids: Tensor
    positions: Tensor
    types: Tensor
    groups: tuple[PaddedGroup, ...]
