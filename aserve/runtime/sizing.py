"""What is measured before the KV cache is sized: the device, the weights on it, and the peak of the largest step.

On a GPU all of it is measured. On a CPU the peak of a step is computed from the model's sizes: it is small there, and
running one would take seconds. Turns the numbers into a ``Sizing``, which does the arithmetic. Called by the executor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from aserve.core.config import EngineConfig
from aserve.core.errors import ConfigError
from aserve.core.memory import MemoryUse
from aserve.core.model_spec import ModelSpec
from aserve.models.model import Model
from aserve.planning.activations import graph_bytes, step_bytes
from aserve.planning.advice import MOST_DRIVER_BYTES
from aserve.planning.kv_elements import plain_elements
from aserve.planning.kv_size import Sizing
from aserve.planning.limits import Limits
from aserve.planning.sizes import show_size
from aserve.planning.weights import weight_bytes
from aserve.runtime.host_memory import available_bytes, own_bytes, total_bytes
from aserve.runtime.profiling import Measured, measure_gpu

MemoryOf = Callable[[Limits], MemoryUse]


def check_weights(spec: ModelSpec, dtype: torch.dtype, limits: Limits, device: torch.device) -> None:
    """Raise ConfigError when the weights cannot fit the GPU: known from the config, before they are read."""
    if device.type != "cuda":
        return
    needed = weight_bytes(spec, dtype_bytes=dtype.itemsize, max_model_len=limits.max_model_len).total
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise too_large(needed, free=free, total=total, dtype_bytes=dtype.itemsize)


def weights_do_not_fit(spec: ModelSpec, dtype: torch.dtype, limits: Limits, device: torch.device) -> ConfigError:
    """The error for weights that ran out of memory although they should have fitted: others have taken it since."""
    needed = weight_bytes(spec, dtype_bytes=dtype.itemsize, max_model_len=limits.max_model_len).total
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return too_large(needed, free=min(free, needed), total=total, dtype_bytes=dtype.itemsize)


def too_large(needed: int, *, free: int, total: int, dtype_bytes: int) -> ConfigError:
    """The error, with the smallest change that makes the weights fit, as far as there is one."""
    message = (
        f"the model's weights take {show_size(needed)}, but of the GPU's {show_size(total)} only {show_size(free)} are "
        f"free; "
    )
    if dtype_bytes == 4 and needed / 2 <= free:
        return ConfigError(message + "set --dtype bfloat16")
    if needed <= total - MOST_DRIVER_BYTES:
        return ConfigError(message + "free what other programs hold")
    return ConfigError(message + "use a smaller or a quantized model, or --device cpu")


class HostMeter:
    """How much memory of the host loading takes: made before the model, read after it."""

    def __init__(self) -> None:
        self._before = own_bytes()

    def read(self, planned: int) -> int:
        """Bytes that this process has allocated since; ``planned`` where the system cannot say."""
        now = own_bytes()
        return planned if now is None or self._before is None else max(0, now - self._before)


def make_sizing(config: EngineConfig, model: Model, limits: Limits, host: HostMeter) -> Sizing:
    """Measure. Where not even one step fits beside the weights, the sizing leaves no room for a KV cache."""
    spec, dtype = model.spec, model.ctx.dtype
    on_gpu = model.ctx.device.type == "cuda"
    measured = (_measure_gpu if on_gpu else _measure_host)(config, model, limits, host)
    return Sizing(
        cache=config.cache,
        limits=limits,
        spec=spec,
        token_bytes=plain_elements(str(dtype).removeprefix("torch.")).token_bytes(spec),
        memory_of=under_other_limits(measured, config, spec, limits, dtype.itemsize),
    )


def under_other_limits(
    measured: MemoryUse, config: EngineConfig, spec: ModelSpec, limits: Limits, dtype_bytes: int
) -> MemoryOf:
    """What was measured, corrected by what the formulas say about the difference of the limits."""
    block_size = config.cache.block_size

    def memory_of(other: Limits) -> MemoryUse:
        here, there = (
            step_bytes(spec, x, dtype_bytes=dtype_bytes, block_size=block_size, on_gpu=measured.on_gpu).total
            for x in (limits, other)
        )
        graphs = graph_bytes(spec, other, dtype_bytes=dtype_bytes, block_size=block_size) if measured.graphs else 0
        return replace(measured, activations=max(0, measured.activations + there - here), graphs=graphs)

    return memory_of


def _measure_gpu(config: EngineConfig, model: Model, limits: Limits, host: HostMeter) -> MemoryUse:
    device, spec, block_size = model.ctx.device, model.spec, config.cache.block_size
    dtype_bytes = model.ctx.dtype.itemsize
    planned = step_bytes(spec, limits, dtype_bytes=dtype_bytes, block_size=block_size).total
    try:
        if planned > torch.cuda.mem_get_info(device)[1]:  # its plan alone might not fit the host
            raise torch.OutOfMemoryError
        measured = measure_gpu(model, limits, block_size=block_size)
    except torch.OutOfMemoryError:
        measured = _without_a_step(device, planned)
    graphs = 0
    if captures_graphs(config, model):  # they are captured over the KV cache, so there is nothing to measure yet
        graphs = graph_bytes(spec, limits, dtype_bytes=dtype_bytes, block_size=block_size)
    return MemoryUse(
        device=torch.cuda.get_device_name(device),
        on_gpu=True,
        total=measured.total,
        others=measured.others,
        weights=measured.weights,
        activations=measured.activations,
        graphs=graphs,
    )


def captures_graphs(config: EngineConfig, model: Model) -> bool:
    """Whether steps of this model are captured: on CUDA, with kernels that allow it, unless it was turned off."""
    return model.ctx.device.type == "cuda" and config.model.cuda_graphs and model.ctx.kernels.can_be_captured


def _without_a_step(device: torch.device, planned: int) -> Measured:
    """What the formula says in place of the measurement: the sizing will fail, and say what to change."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_reserved(device)
    others = max(0, total - free - weights)
    return Measured(total=total, others=others, weights=weights, activations=max(planned, free + 1))


def _measure_host(config: EngineConfig, model: Model, limits: Limits, host: HostMeter) -> MemoryUse:
    dtype_bytes = model.ctx.dtype.itemsize
    planned = weight_bytes(model.spec, dtype_bytes=dtype_bytes, max_model_len=limits.max_model_len).total
    step = step_bytes(
        model.spec, limits, dtype_bytes=dtype_bytes, block_size=config.cache.block_size, on_gpu=False
    ).total
    available, total = available_bytes(), total_bytes()
    weights = min(max(planned, host.read(planned)), total)
    return MemoryUse(
        device="the host",
        on_gpu=False,
        total=total,
        others=max(0, total - available - weights),
        weights=weights,
        activations=step,
    )


def captured(capture: Callable[[], None], memory: MemoryUse, device: torch.device) -> MemoryUse:
    """Capture graphs; returns the memory with what they really take. CUDA only.

    Raises ConfigError when there is not enough of it.
    """
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(device)
    try:
        capture()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the CUDA graphs do not fit beside the KV cache: {show_size(memory.graphs)} were planned for them, and "
            f"{show_size(before)} were free; set a smaller KV cache, or --no-cuda-graphs"
        ) from error
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info(device)
    return replace(memory, graphs=max(0, before - after))
