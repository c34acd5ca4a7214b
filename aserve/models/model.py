"""What the runtime needs from a model, and the table by which checkpoints name its weights.

Every family in ``aserve.models`` satisfies ``Model`` structurally; the loader reads ``weight_targets`` and
``IGNORED``, the model runner calls ``forward`` and ``compute_logits``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from torch import Tensor

from aserve.core.model_spec import ModelSpec
from aserve.layers.batch import ForwardBatch
from aserve.layers.context import LayerContext
from aserve.layers.weights import WeightTarget


class Model(Protocol):
    """A decoder-only language model. Letters: T tokens of the step, S rows to sample, H hidden size, V vocabulary.

    Built as ``Class(spec, ctx, num_positions)``, where ``num_positions`` is the longest sequence to be computed.
    """

    IGNORED: ClassVar[tuple[str, ...]]
    """Checkpoint names, as ``fnmatch`` patterns, of tensors that are computed or not needed."""

    spec: ModelSpec
    ctx: LayerContext

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """Return where each checkpoint tensor goes, by its name; every one must be loaded exactly once."""
        ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run one step, writing keys and values into the batch's caches; returns hidden states [T, H]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [S, V] float32 (a new tensor) for ``hidden`` [S, H], rows of what ``forward`` returned."""
        ...
