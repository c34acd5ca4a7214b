"""How a model would fill a GPU that need not be there: the sizing that a server would come to, from the config alone.

The same ``Sizing`` as at a start, with computed numbers where a start measures. It also answers for what can be sized
but not served yet (several GPUs, quantised weights, KV of other types), and says so. Called by ``aserve plan``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, parse_bytes
from aserve.core.errors import ConfigError
from aserve.core.memory import MemoryUse
from aserve.core.model_spec import ModelSpec
from aserve.planning.activations import graph_bytes, step_bytes
from aserve.planning.advice import sized_capacity
from aserve.planning.kv_elements import QUANTIZED, KvElements, plain_elements
from aserve.planning.kv_size import Sizing, count_blocks
from aserve.planning.limits import Limits
from aserve.planning.quantization import WeightFormat, read_weight_format
from aserve.planning.sizes import show_size
from aserve.planning.weights import WeightBytes, num_parameters, weight_bytes

DRIVER_BYTES = 600 * 2**20
"""What the driver's context and loaded kernels take on a GPU that nobody else uses."""

NOT_SERVED = "planned for sizing only; serve cannot run this yet"
SERVED_METHODS: frozenset[str] = frozenset()
"""Quantisation methods of weights that ``aserve.quantization`` can load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The GPUs to plan for: bytes of each, how many share the model, and what others hold of each."""

    total: int
    ranks: int = 1
    others: int = DRIVER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One model on one kind of GPU, with every type of KV.

    Attributes:
        weights: how the checkpoint stores the linear layers; None: plainly.
        dtype: of activations and of weights that are not quantised.
        kv: the type that was asked for.
        sizings: by type of KV; that of ``kv`` comes first.
    """

    spec: ModelSpec
    weights: WeightFormat | None
    weight_bytes: WeightBytes
    dtype: str
    device: Device
    kv: KvElements
    sizings: Mapping[KvElements, Sizing]

    @property
    def sizing(self) -> Sizing:
        """That of the type that was asked for."""
        return self.sizings[self.kv]

    def not_served(self) -> Iterator[str]:
        """What of this plan a server cannot do yet."""
        if self.weights is not None and self.weights.method not in SERVED_METHODS:
            yield f"{self.weights.method} weights"
        if self.device.ranks > 1:
            yield f"--tp {self.device.ranks}"
        if not self.is_served(self.kv):
            yield f"--kv-dtype {self.kv.name}"

    def is_served(self, kv: KvElements) -> bool:
        """Whether a server can keep KV of this type: only that of the activations so far."""
        return kv.name == self.dtype


def make_plan(config: EngineConfig, model: Mapping[str, Any], device: Device, kv_dtype: str = "auto") -> Plan:
    """Return the plan for a parsed ``config.json``.

    Raises ModelLoadError for a config that is damaged or unknown, ConfigError for settings that contradict it.
    """
    if config.model.device == "cpu":
        raise ConfigError("aserve plan is for GPUs; leave --device out")
    spec, weights = ModelSpec.from_hf(model), read_weight_format(model)
    limits = Limits.of(config, spec, on_gpu=True)
    dtype = _dtype(config, spec)
    plain = plain_elements(dtype)
    types = {kv.name: kv for kv in (plain, *QUANTIZED)} | {"auto": plain, "bf16": plain_elements("bfloat16")}
    kv = types[kv_dtype]
    others = [other for other in (plain, *QUANTIZED) if other != kv]
    return Plan(
        spec=spec,
        weights=weights,
        weight_bytes=weight_bytes(
            spec,
            dtype_bytes=plain.bits // 8,
            max_model_len=limits.max_model_len,
            ranks=device.ranks,
            weights=weights,
        ),
        dtype=dtype,
        device=device,
        kv=kv,
        sizings={each: _sizing(config, spec, weights, device, each, plain.bits // 8) for each in (kv, *others)},
    )


def capacity_of(plan: Plan) -> Capacity:
    """What a server would hold. Raises TooLittleMemoryError, which names the smallest change that works."""
    capacity = sized_capacity(plan.sizing)
    return replace(capacity, memory=plan.sizing.memory_with(capacity))


def fitting_capacity(sizing: Sizing) -> Capacity | None:
    """The same for any sizing; None when it does not fit."""
    try:
        return sizing.capacity(count_blocks(sizing))
    except ConfigError:
        return None


def describe(plan: Plan) -> Iterator[str]:
    """Lines about the model, before the table."""
    sizes, limits = plan.weight_bytes, plan.sizing.limits
    yield f"{plan.spec.architecture}, {num_parameters(plan.spec) / 1e9:.2f} billion weights in {plan.dtype}"
    if plan.weights is not None:
        yield f"linear layers stored as {plan.weights.describe()}: {show_size(sizes.quantized)} with scales"
        yield f"embeddings, norms, biases and layers left alone stay in {plan.dtype}: {show_size(sizes.plain)}"
    if plan.device.ranks > 1:
        yield f"numbers are for each of {plan.device.ranks} GPUs"
    yield f"a step has at most {limits.max_batch_tokens:,} tokens and {limits.max_num_seqs:,} sequences"
    yield f"keys and values are kept as {plan.kv.name}"
    for thing in plan.not_served():
        yield f"{thing}: {NOT_SERVED}"


def _dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """As a server on a GPU chooses it."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if spec.dtype in ("float32", "float64"):
        return "float32"
    return spec.dtype if spec.dtype in ("bfloat16", "float16") else "bfloat16"


def _sizing(
    config: EngineConfig,
    spec: ModelSpec,
    weights: WeightFormat | None,
    device: Device,
    kv: KvElements,
    dtype_bytes: int,
) -> Sizing:
    """What a start would measure, computed."""
    block_size, ranks = config.cache.block_size, device.ranks

    def memory_of(limits: Limits) -> MemoryUse:
        size = weight_bytes(
            spec, dtype_bytes=dtype_bytes, max_model_len=limits.max_model_len, ranks=ranks, weights=weights
        )
        step = step_bytes(spec, limits, dtype_bytes=dtype_bytes, block_size=block_size, ranks=ranks)
        graphs = graph_bytes(spec, limits, dtype_bytes=dtype_bytes, block_size=block_size, ranks=ranks)
        return MemoryUse(
            device=f"a GPU of {show_size(device.total)}",
            on_gpu=True,
            total=device.total,
            others=device.others,
            weights=size.total,
            activations=step.total,
            graphs=graphs if config.model.cuda_graphs else 0,
        )

    in_half = None
    if dtype_bytes == 4:
        half = KvElements("bfloat16", 16) if kv.bits == 32 else kv
        in_half = _sizing(config, spec, weights, device, half, 2)
    return Sizing(
        cache=config.cache,
        limits=Limits.of(config, spec, on_gpu=True),
        spec=spec,
        token_bytes=kv.token_bytes(spec, ranks),
        memory_of=memory_of,
        in_half=in_half,
    )


def read_device(gpu_memory: str | None, ranks: int) -> Device:
    """The device of a command line. Raises ConfigError."""
    if gpu_memory is None:
        raise ConfigError("say how much memory the GPU has, for example --gpu-memory 24GiB")
    total = parse_bytes(gpu_memory, "--gpu-memory")
    if total < 2**30:
        raise ConfigError(f"--gpu-memory {gpu_memory} is less than any GPU has; did you mean {gpu_memory}GiB?")
    if ranks < 1:
        raise ConfigError(f"--tp must be at least 1, got {ranks}")
    return Device(total=total, ranks=ranks)
