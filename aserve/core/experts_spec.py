"""Layers whose MLP is a choice of several (mixture of experts), as a model's ``config.json`` describes them.

Called by ``model_spec``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from aserve.core.config_reader import ConfigReader
from aserve.core.errors import ModelLoadError
from aserve.core.families import Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The experts of a model; all its layers that have any have as many.

    Attributes:
        num_experts: of a layer.
        num_active: how many of them compute a token.
        intermediate_size: of one expert.
        renormalize: whether the weights of those that compute a token are made to sum to 1.
        shared_size: intermediate size of an MLP that computes every token beside them; 0: there is none.
        by_layer: whether each layer has experts; the others have an MLP of the model's intermediate size.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    renormalize: bool
    shared_size: int
    by_layer: tuple[bool, ...]


def read_experts(reader: ConfigReader, keys: Experts, num_layers: int) -> ExpertsSpec | None:
    """Return the experts that a config describes by a family's keys. Raises ModelLoadError that names the field."""
    if keys == "none":
        return None
    if keys == "mixtral":
        return _checked(
            ExpertsSpec(
                num_experts=reader.integer("num_local_experts"),
                num_active=reader.integer("num_experts_per_tok"),
                intermediate_size=reader.integer("intermediate_size"),
                renormalize=True,
                shared_size=0,
                by_layer=(True,) * num_layers,
            )
        )
    has_shared = reader.has("shared_expert_intermediate_size")
    # transformers 5 writes Qwen3's number of experts under Mixtral's name.
    count = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
    return _checked(
        ExpertsSpec(
            num_experts=reader.integer(count),
            num_active=reader.integer("num_experts_per_tok"),
            intermediate_size=reader.integer("moe_intermediate_size"),
            renormalize=reader.boolean("norm_topk_prob", False),
            shared_size=reader.integer("shared_expert_intermediate_size") if has_shared else 0,
            by_layer=_sparse_layers(reader, num_layers),
        )
    )


def _checked(spec: ExpertsSpec) -> ExpertsSpec:
    if spec.num_active > spec.num_experts:
        raise ModelLoadError(
            f"config.json: num_experts_per_tok {spec.num_active} is more than the {spec.num_experts} experts there are"
        )
    return spec


def _sparse_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    step = reader.integer("decoder_sparse_step", 1)
    found: object = reader.config.get("mlp_only_layers") or []
    plain = cast("list[object]", found) if isinstance(found, list) else [found]
    if not all(isinstance(n, int) for n in plain) or not isinstance(found, list):
        raise reader.error("mlp_only_layers", plain, "a list of layer numbers")
    return tuple((n + 1) % step == 0 and n not in plain for n in range(num_layers))
