"""How checkpoint tensors find their way into layers.

A model lists its weights as rows of ``WeightRow`` (checkpoint name, layer, shard); ``expand_weights`` turns them into
one target per checkpoint tensor, which is all that the loader sees. Layers that hold weights satisfy ``Loadable``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Loadable(Protocol):
    """A layer with weights. A shard is one of the checkpoint's matrices that make up a fused one ("q", "gate", "")."""

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        """Return name ("weight", "bias") and whole shape of each checkpoint tensor of a shard."""
        ...

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        """Copy this rank's part of a checkpoint tensor, whose shape was checked; converts the dtype."""
        ...

    def finish_loading(self) -> None:
        """Called once after everything was loaded."""
        ...


class WeightRow(NamedTuple):
    """One row of a model's WEIGHTS table.

    Attributes:
        checkpoint: name in the checkpoint without the last part, ``*`` standing for the layer number and ``#`` for
            the expert's: ``model.layers.*.self_attn.q_proj``.
        layer: attribute path from the model, ``*`` likewise: ``layers.*.attention.qkv_proj``.
        shard: which part of a fused layer, ``#`` likewise.
    """

    checkpoint: str
    layer: str
    shard: str = ""


class WeightTarget(NamedTuple):
    """Where one checkpoint tensor goes: ``layer.load(shard, name, tensor)``; ``shape`` is the checkpoint's."""

    layer: Loadable
    shard: str
    name: str
    shape: tuple[int, ...]


def expand_weights(
    model: object, rows: tuple[WeightRow, ...], layers: Sequence[int], *, num_experts: int = 0
) -> dict[str, WeightTarget]:
    """Return the target of each checkpoint tensor of ``model``, by its full name, in the order of the table.

    ``layers``: the numbers of those that the rows with ``*`` are about.
    """
    targets: dict[str, WeightTarget] = {}
    for row in rows:
        for number in layers if "*" in row.checkpoint else (0,):
            layer = _resolve(model, row.layer.replace("*", str(number)))
            for expert in range(num_experts) if "#" in row.checkpoint else (0,):
                prefix = row.checkpoint.replace("*", str(number)).replace("#", str(expert))
                shard = row.shard.replace("#", str(expert))
                for name, shape in layer.tensor_shapes(shard).items():
                    full_name = f"{prefix}.{name}"
                    assert full_name not in targets, f"two rows of the table write {full_name}"
                    targets[full_name] = WeightTarget(layer, shard, name, shape)
    return targets


def _resolve(model: object, path: str) -> Loadable:
    value = model
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list | tuple) else getattr(value, part)
    return value  # type: ignore[return-value]
