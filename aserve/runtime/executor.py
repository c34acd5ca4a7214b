"""The executor of one process: a model on one device behind ``core.step.StepExecutor``.

Everything here runs on the step thread, loading included, and is the only code that calls torch. Knows no requests
beyond plan rows, no event loop, no HTTP. Built by the composition root through ``build_executor``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from aserve.core.capacity import Capacity
from aserve.core.config import CacheConfig, EngineConfig
from aserve.core.errors import ConfigError
from aserve.core.memory import MemoryUse
from aserve.core.step import StepPlan, StepResult
from aserve.grammar import GrammarCompiler
from aserve.models.model import Model
from aserve.planning.advice import limit_warning, sized_capacity
from aserve.planning.kv_size import Sizing
from aserve.planning.limits import Limits
from aserve.planning.table import memory_line
from aserve.planning.weights import num_parameters
from aserve.runtime import kv_cache
from aserve.runtime.device import choose_device, choose_dtype, choose_kernels, choose_num_threads
from aserve.runtime.host_memory import available_bytes
from aserve.runtime.host_tier import HostTier, count_host_blocks
from aserve.runtime.loader import load_model, read_spec
from aserve.runtime.model_runner import LaunchedStep, ModelRunner
from aserve.runtime.sizing import HostMeter, captured, captures_graphs, check_weights, make_sizing, weights_do_not_fit

_log = logging.getLogger(__name__)

_SLOT_BYTES = 512  # of sampling parameters and bookkeeping, block table aside


class Runner(Protocol):
    """What computes steps: of a decoder, or of an encoder."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step. On the CPU this computes it."""
        ...


class LocalExecutor:
    """Runs plans in order. On CUDA a step is queued at ``submit``; on the CPU it is computed in ``wait``.

    So on the CPU, too, two steps may be submitted, and the tokens of the first never wait for the second.
    """

    def __init__(self, runner: Runner, capacity: Capacity, *, lazy: bool, host_tier: HostTier | None = None) -> None:
        """``host_tier`` has ``capacity.num_host_blocks`` blocks; None if there are none."""
        self._runner: Runner | None = runner
        self._host_tier = host_tier
        self._capacity = capacity
        self._lazy = lazy
        self._unread: deque[StepPlan | LaunchedStep] = deque()

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        """Start a step without waiting for its result; at most ``capacity.max_in_flight`` may be unread."""
        assert len(self._unread) < self._capacity.max_in_flight, "too many steps submitted and not waited for"
        self._unread.append(plan if self._lazy else self._launch(plan))

    def wait(self) -> StepResult:
        """Return the result of the oldest step not yet waited for; blocks."""
        assert self._runner is not None, "the executor is closed"
        step = self._unread.popleft()
        if isinstance(step, StepPlan):
            step = self._launch(step)
        return step.result()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        assert self._runner is not None, "the executor is closed"
        if plan.saves or plan.restores:
            assert self._host_tier is not None, "the plan copies to host blocks that the capacity does not have"
            self._host_tier.copy(plan)
        return self._runner.launch(plan)

    def close(self) -> None:
        """Release the model and the KV cache. Idempotent."""
        self._unread.clear()
        self._runner = None
        if self._host_tier is not None:
            self._host_tier.close()
            self._host_tier = None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def build_executor(
    config: EngineConfig,
    folder: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    cache_dir: Path | None = None,
    grammars: GrammarCompiler | None = None,
) -> LocalExecutor:
    """Load the model in ``folder``, size and allocate its KV cache, and log where the memory went.

    ``progress`` is told of (bytes loaded, bytes in all); ``cache_dir`` keeps what kernels compile, ``grammars`` has
    what grammars compile to. Raises ConfigError when settings contradict the model or the machine, ModelLoadError.
    """
    device = choose_device(config.model)
    kernels = choose_kernels(config.model, device, cache_dir)
    spec = read_spec(folder)
    dtype = choose_dtype(config.model, spec.dtype, device)
    limits = Limits.of(config, spec, on_gpu=device.type == "cuda")
    _check_slots(limits, config.cache.block_size, available_bytes())
    num_threads = choose_num_threads(config.model, device, num_parameters(spec) * dtype.itemsize)
    if num_threads is not None:
        kernels.use_threads(num_threads, dtype)  # on this thread, which is the one that steps
    check_weights(spec, dtype, limits, device)
    host = HostMeter()
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
            raise weights_do_not_fit(spec, dtype, limits, device) from error
        sizing = make_sizing(config, model, limits, host)
        capacity = sized_capacity(sizing)
        caches = kv_cache.allocate(
            model.spec,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            dtype=dtype,
            device=device,
            flag="--kv-cache-memory" if config.cache.kv_cache_tokens is None else "--kv-cache-tokens",
        )
        host_tier = _allocate_host_tier(config.cache, caches, sizing)
        if host_tier is not None:
            capacity = host_tier.extend(capacity)
        try:
            runner = ModelRunner(model, caches, capacity, grammars)
        except MemoryError:
            raise _too_many_slots(limits, available_bytes()) from None
        memory = sizing.memory_with(capacity)
        if captures_graphs(config, model):
            memory = captured(lambda: runner.capture_graphs(capacity), memory, device)
    capacity = replace(capacity, memory=memory)
    _log_summary(model, sizing, capacity, memory)
    return LocalExecutor(runner, capacity, lazy=device.type == "cpu", host_tier=host_tier)


def _allocate_host_tier(config: CacheConfig, caches: kv_cache.KvCaches, sizing: Sizing) -> HostTier | None:
    """Return the memory that --host-cache-memory asks for. Raises ConfigError when it is not there."""
    memory = sizing.memory_of(sizing.limits)
    step_bytes = 0 if memory.on_gpu else memory.activations  # steps run in the same memory, and none has run yet
    num_blocks = count_host_blocks(
        config.host_cache_memory, block_bytes=sizing.block_bytes, available=available_bytes() - step_bytes
    )
    return HostTier(caches, num_blocks) if num_blocks else None


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


def _log_summary(model: Model, sizing: Sizing, capacity: Capacity, memory: MemoryUse) -> None:
    spec, ctx = model.spec, model.ctx
    _log.info(
        "loaded %s: %.1f M parameters, %s on %s, %s kernels; %d sequences and %d tokens per step, context %d",
        spec.architecture, num_parameters(spec) / 1e6, str(ctx.dtype).removeprefix("torch."), ctx.device,
        ctx.kernels.description, capacity.max_num_seqs, capacity.max_batch_tokens, capacity.max_model_len,
    )  # fmt: skip
    _log.info("%s", memory_line(memory, capacity))
    warning = limit_warning(sizing, capacity)
    if warning is not None:
        _log.warning("%s", warning)
