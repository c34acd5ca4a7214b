"""At which context a model's attention costs as much as the rest of it: what makes late chunks of a prompt slow.

Arithmetic over a ``ModelSpec``; the number goes into ``Capacity``, by which the scheduler sizes chunks.
"""

from __future__ import annotations

from aserve.core.model_spec import ModelSpec
from aserve.planning.weights import num_layer_parameters

ATTENTION_SLOWDOWN = 2
"""How much longer one operation takes in attention than in a matrix product. On an H200 attention over paged keys does
225 to 347 TFLOP/s (docs/explanation/performance.md), matrices 600 to 700. Too high a number makes late chunks smaller
than they need be, too low a one lets them take longer than the first; 1.5 to 3 serves the simulated machines."""


def parity_context(spec: ModelSpec) -> int:
    """Return the context at which a prompt's token spends as long in attention as in the rest of the layers.

    A token takes two operations per weight of the layers; and per token of context, in each head of each layer,
    ``2 * head_dim`` for its score and as many for its share of the values.
    """
    by_context = 2 * spec.num_heads * spec.head_dim * spec.num_layers
    return max(1, num_layer_parameters(spec) // (by_context * ATTENTION_SLOWDOWN))
