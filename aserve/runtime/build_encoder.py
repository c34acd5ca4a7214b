"""Builds the executor of an encoder: no KV cache to size, and every input in one step.

The blocks that its capacity reports hold nothing: they are what lets one scheduler count places for both kinds of
models. What bounds a step are its tokens and its sequences. Called by the composition root.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig
from aserve.core.encoder_spec import EncoderSpec
from aserve.core.errors import ConfigError
from aserve.core.memory import MemoryUse
from aserve.planning.limits import Limits
from aserve.planning.sizes import show_size
from aserve.runtime.device import choose_device, choose_dtype, choose_kernels, choose_num_threads
from aserve.runtime.encoder_runner import EncoderRunner
from aserve.runtime.executor import LocalExecutor
from aserve.runtime.host_memory import available_bytes, total_bytes
from aserve.runtime.loader import load_encoder, stored_dtype

_log = logging.getLogger(__name__)

_FLOAT_BYTES = 4


def build_encoder(
    config: EngineConfig,
    folder: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    cache_dir: Path | None = None,
) -> LocalExecutor:
    """Load the encoder in ``folder``. Raises ConfigError, ModelLoadError, as ``build_executor`` does."""
    device = choose_device(config.model)
    kernels = choose_kernels(config.model, device, cache_dir)
    spec = EncoderSpec.from_folder(folder)
    dtype = choose_dtype(config.model, spec.dtype or stored_dtype(folder), device)
    capacity = encoder_capacity(config, spec, on_gpu=device.type == "cuda")
    num_threads = choose_num_threads(config.model, device, spec.num_weights * dtype.itemsize)
    if num_threads is not None:
        kernels.use_threads(num_threads, dtype)
    memory = _memory(spec, capacity, dtype, device)
    if memory.weights + memory.activations > memory.total - memory.others:
        raise ConfigError(
            f"the model's weights take {show_size(memory.weights)} and a step {show_size(memory.activations)}, but "
            f"only {show_size(memory.total - memory.others)} are free; free what other programs hold, or lower "
            "--max-batch-tokens"
        )
    with torch.inference_mode():
        model = load_encoder(folder, spec=spec, dtype=dtype, device=device, kernels=kernels, progress=progress)
    _log.info(
        "loaded %s: %.1f M parameters, %s on %s; %d inputs and %d tokens per step, inputs of up to %d tokens",
        spec.architecture, spec.num_weights / 1e6, str(dtype).removeprefix("torch."), device,
        capacity.max_num_seqs, capacity.max_batch_tokens, capacity.max_length,
    )  # fmt: skip
    runner = EncoderRunner(model, capacity.max_num_seqs)
    return LocalExecutor(runner, replace(capacity, memory=memory), lazy=device.type == "cpu")


def encoder_capacity(config: EngineConfig, spec: EncoderSpec, *, on_gpu: bool) -> Capacity:
    """What an encoder's executor can hold; by default a step takes an input of any length that the model knows."""
    limits = Limits.of(config, spec, on_gpu=on_gpu)
    max_batch_tokens = limits.max_batch_tokens
    if config.scheduler.max_batch_tokens is None:
        max_batch_tokens = max(max_batch_tokens, limits.max_model_len)
    block_size = config.cache.block_size
    return Capacity(
        num_blocks=limits.max_num_seqs * (-(-limits.max_model_len // block_size) + 1),
        block_size=block_size,
        max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_model_len=limits.max_model_len,
        max_in_flight=limits.max_in_flight,
        vocab_size=spec.vocab_size,
        whole_prompts=True,
    )


def _memory(spec: EncoderSpec, capacity: Capacity, dtype: torch.dtype, device: torch.device) -> MemoryUse:
    """Before loading: what there is, and by the model's sizes what it and a step will take."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
    else:
        free, total, name = available_bytes(), total_bytes(), "the host"
    by_token = (9 * spec.hidden_size + 2 * spec.intermediate_size) * dtype.itemsize
    scores = 2 * spec.num_heads * min(capacity.max_length, capacity.max_batch_tokens) * _FLOAT_BYTES
    return MemoryUse(
        device=name,
        on_gpu=device.type == "cuda",
        total=total,
        others=total - free,
        weights=spec.num_weights * dtype.itemsize,
        activations=capacity.max_batch_tokens * (by_token + scores),
    )
