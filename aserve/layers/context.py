"""What every layer is given when it is built, in place of globals.

Made once per model by the loader and passed down by constructors. It holds choices, no tensors and no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aserve.distributed.group import TPGroup
from aserve.quantization.method import QuantScheme
from aserve_kernels.kernel_set import KernelSet


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The surroundings of a layer.

    Attributes:
        kernels: the operations that are not matrix products.
        group: the ranks that share the model; ``SoloGroup`` for one.
        quant: how weights are stored and multiplied.
        dtype: of activations, and of weights that are not quantised.
        device: where weights live.
    """

    kernels: KernelSet
    group: TPGroup
    quant: QuantScheme
    dtype: torch.dtype
    device: torch.device
