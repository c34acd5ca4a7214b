"""The executor of one process: a model on one device behind ``core.step.StepExecutor``.

Everything here runs on the step thread, loading included, and is the only code that calls torch. Knows no requests
beyond plan rows, no event loop, no HTTP. Built by the composition root through ``build_executor``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, SchedulerConfig
from aserve.core.errors import ConfigError
from aserve.core.kv_layout import KVLayout
from aserve.core.model_spec import ModelSpec
from aserve.core.step import StepPlan, StepResult
from aserve.models.model import Model
from aserve.runtime import kv_cache
from aserve.runtime.device import choose_device, choose_dtype, choose_kernels, choose_num_threads
from aserve.runtime.host_memory import available_bytes
from aserve.runtime.loader import load_model, read_spec
from aserve.runtime.model_runner import LaunchedStep, ModelRunner
from aserve.runtime.profiling import measure_gpu

_log = logging.getLogger(__name__)

_SLOT_BYTES = 512  # of sampling parameters and bookkeeping, block table aside


class LocalExecutor:
    """Runs plans in order. On CUDA a step is queued at ``submit``; on the CPU it is computed in ``wait``.

    So on the CPU, too, two steps may be submitted, and the tokens of the first never wait for the second.
    """

    def __init__(self, runner: ModelRunner, capacity: Capacity, *, lazy: bool) -> None:
        self._runner: ModelRunner | None = runner
        self._capacity = capacity
        self._lazy = lazy
        self._unread: deque[StepPlan | LaunchedStep] = deque()

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        """Start a step without waiting for its result; at most ``capacity.max_in_flight`` may be unread."""
        assert self._runner is not None, "the executor is closed"
        assert len(self._unread) < self._capacity.max_in_flight, "too many steps submitted and not waited for"
        self._unread.append(plan if self._lazy else self._runner.launch(plan))

    def wait(self) -> StepResult:
        """Return the result of the oldest step not yet waited for; blocks."""
        assert self._runner is not None, "the executor is closed"
        step = self._unread.popleft()
        if isinstance(step, StepPlan):
            step = self._runner.launch(step)
        return step.result()

    def close(self) -> None:
        """Release the model and the KV cache. Idempotent."""
        self._unread.clear()
        self._runner = None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The scheduler's limits with the device's defaults filled in."""

    max_num_seqs: int
    max_batch_tokens: int
    max_in_flight: int
    max_model_len: int

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec, device: torch.device) -> Limits:
        """Fill in the defaults. Raises ConfigError when ``max_model_len`` is more than the model's context."""
        scheduler: SchedulerConfig = config.scheduler
        cuda = device.type == "cuda"
        max_model_len = config.model.max_model_len or spec.max_positions
        if max_model_len > spec.max_positions:
            raise ConfigError(
                f"--max-model-len {max_model_len} is more than the model's context of {spec.max_positions} tokens"
            )
        return cls(
            max_num_seqs=scheduler.max_num_seqs or (256 if cuda else 32),
            max_batch_tokens=scheduler.max_batch_tokens or (8192 if cuda else 512),
            max_in_flight=scheduler.max_in_flight or (2 if cuda else 1),
            max_model_len=max_model_len,
        )


def build_executor(
    config: EngineConfig, folder: Path, *, progress: Callable[[int, int], None] | None = None
) -> LocalExecutor:
    """Load the model in ``folder``, size and allocate its KV cache, and log one line about the result.

    ``progress`` is told of (bytes loaded, bytes in all). Raises ConfigError for settings that contradict the model or
    the machine, ModelLoadError for a checkpoint that cannot be used.
    """
    device = choose_device(config.model)
    kernels = choose_kernels(config.model, device)
    spec = read_spec(folder)
    dtype = choose_dtype(config.model, spec.dtype, device)
    limits = Limits.of(config, spec, device)
    _check_slots(limits, config.cache.block_size, available_bytes())
    num_threads = choose_num_threads(config.model, device, _num_parameters(spec) * dtype.itemsize)
    if num_threads is not None:
        torch.set_num_threads(num_threads)  # for OpenMP this is a setting of the calling thread: the one that steps
    with torch.inference_mode():
        try:
            model = load_model(
                folder,
                spec=spec,
                dtype=dtype,
                device=device,
                kernels=kernels,
                progress=progress,
                max_model_len=limits.max_model_len,
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the model's weights do not fit {device}; use a smaller model, or --device cpu"
            ) from error
        unbounded = Capacity(
            num_blocks=2**62,
            block_size=config.cache.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_batch_tokens=limits.max_batch_tokens,
            max_model_len=limits.max_model_len,
            max_in_flight=limits.max_in_flight,
            vocab_size=spec.vocab_size,
            windows=KVLayout.of(spec.sliding_windows).windows,
        )
        num_blocks = _count_blocks(config, model, limits, unbounded.num_blocks_for(limits.max_model_len))
        capacity = replace(unbounded, num_blocks=num_blocks)
        caches = kv_cache.allocate(
            model.spec, num_blocks=num_blocks, block_size=capacity.block_size, dtype=model.ctx.dtype, device=device
        )
        try:
            runner = ModelRunner(model, caches, capacity)
        except MemoryError:
            raise _too_many_slots(limits, available_bytes()) from None
    _log_summary(model, capacity)
    return LocalExecutor(runner, capacity, lazy=device.type == "cpu")


def _check_slots(limits: Limits, block_size: int, available: int) -> None:
    """Raise ConfigError when the tables of all slots do not fit the host: filling them would end the process."""
    slot_bytes = _SLOT_BYTES + 4 * -(-limits.max_model_len // block_size)
    if limits.max_num_seqs * slot_bytes > available:
        raise _too_many_slots(limits, available)


def _too_many_slots(limits: Limits, available: int) -> ConfigError:
    return ConfigError(
        f"--max-num-seqs {limits.max_num_seqs}: {available / 2**30:.2f} GiB of host memory do not hold the tables of "
        f"so many sequences of up to {limits.max_model_len} tokens; lower it"
    )


def _count_blocks(config: EngineConfig, model: Model, limits: Limits, sequence_blocks: int) -> int:
    block_size = config.cache.block_size
    needs = kv_cache.CacheNeeds(
        block_bytes=kv_cache.block_bytes(model.spec, model.ctx.dtype, block_size),
        sequence_blocks=sequence_blocks,
        max_num_seqs=limits.max_num_seqs,
    )
    if model.ctx.device.type == "cpu":
        return kv_cache.count_cpu_blocks(config.cache, needs, available_bytes())
    try:
        memory = measure_gpu(
            model,
            max_num_seqs=limits.max_num_seqs,
            max_batch_tokens=limits.max_batch_tokens,
            max_length=limits.max_model_len,
            block_size=block_size,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {limits.max_batch_tokens} tokens does not fit beside the model's weights; "
            f"lower --max-batch-tokens or --max-num-seqs"
        ) from error
    return kv_cache.count_gpu_blocks(config.cache, needs, memory)


def _log_summary(model: Model, capacity: Capacity) -> None:
    spec, ctx = model.spec, model.ctx
    size = capacity.num_blocks * kv_cache.block_bytes(spec, ctx.dtype, capacity.block_size)
    _log.info(
        "loaded %s: %.1f M parameters, %s on %s, %s kernels; KV cache %d tokens (%.2f GiB), "
        "%d sequences and %d tokens per step, context %d",
        spec.architecture, _num_parameters(spec) / 1e6, str(ctx.dtype).removeprefix("torch."), ctx.device,
        ctx.kernels.name, capacity.num_kv_tokens, size / 2**30, capacity.max_num_seqs, capacity.max_batch_tokens,
        capacity.max_model_len,
    )  # fmt: skip
    if capacity.num_kv_tokens < capacity.max_model_len:
        _log.warning(
            "the KV cache holds %d tokens, less than the context of %d: prompts and answers are limited to that",
            capacity.num_kv_tokens, capacity.max_model_len,
        )  # fmt: skip


def _num_parameters(spec: ModelSpec) -> int:
    """Weights as the sizes give them, biases aside, whatever form quantisation keeps them in."""
    attention = 2 * spec.hidden_size * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    norms = 2 * spec.hidden_size
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    return embeddings + spec.num_layers * (attention + mlp + norms) + spec.hidden_size
