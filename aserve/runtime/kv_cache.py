"""The paged KV cache: how many blocks fit, and their allocation.

Sizing is arithmetic over measured numbers, so it is tested without a device; whoever builds the executor measures.
Knows nothing of which block belongs to whom: that is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.core.config import CacheConfig, parse_bytes
from aserve.core.errors import ConfigError
from aserve.core.kv_layout import KVLayout
from aserve.core.model_spec import ModelSpec

_KIB = 2**10
_MIB = 2**20
DEFAULT_CPU_BYTES = 2**30
DEFAULT_GPU_FRACTION = 0.9

KvCaches = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNeeds:
    """What the cache is for.

    Attributes:
        block_bytes: bytes of one block, keys and values of all layers.
        sequence_blocks: blocks of one sequence of the model's whole length.
        max_num_seqs: sequences that run together.
    """

    block_bytes: int
    sequence_blocks: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Bytes of one device: its whole memory, what others use of it, and this process's weights and step peak."""

    total: int
    others: int
    weights: int
    activations: int


def block_bytes(spec: ModelSpec, dtype: torch.dtype, block_size: int) -> int:
    """Return the bytes of one block: keys and values of ``block_size`` tokens in the layers of one KV group."""
    num_layers = KVLayout.of(spec.sliding_windows).layers_per_group
    return 2 * num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def count_cpu_blocks(config: CacheConfig, needs: CacheNeeds, available: int) -> int:
    """Return the number of blocks on a CPU with ``available`` bytes free after loading the weights.

    Default: enough for ``max_num_seqs`` sequences of full length, but at most 1 GiB and a quarter of what is
    available, and at least one such sequence where half of the available memory holds it. Raises ConfigError when
    the size asked for is not there or holds no block.
    """
    if config.gpu_memory_fraction is not None:
        raise ConfigError("--gpu-memory-fraction needs a GPU; on the CPU use --kv-cache-memory or --kv-cache-tokens")
    asked = _asked_blocks(config, needs)
    if asked is not None:
        _check_fits(config, needs, asked, available)
        return asked
    most = min(DEFAULT_CPU_BYTES, available // 4) // needs.block_bytes
    least = min(needs.sequence_blocks, available // 2 // needs.block_bytes)
    num_blocks = max(least, min(needs.sequence_blocks * needs.max_num_seqs, most))
    if num_blocks < 1:
        raise ConfigError(
            f"too little memory for a KV cache: {_size(available)} are available after loading the model, and one "
            f"block takes {_size(needs.block_bytes)}; free memory or use a smaller model"
        )
    return num_blocks


def count_gpu_blocks(config: CacheConfig, needs: CacheNeeds, memory: GpuMemory) -> int:
    """Return the number of blocks on a GPU. Raises ConfigError when what is asked for is not there, or no block fits.

    Default: what ``gpu_memory_fraction`` (0.9) of the whole device leaves beside weights, activations and others.
    """
    taken = memory.others + memory.weights + memory.activations
    asked = _asked_blocks(config, needs)
    if asked is not None:
        _check_fits(config, needs, asked, memory.total - taken)
        return asked
    fraction = DEFAULT_GPU_FRACTION if config.gpu_memory_fraction is None else config.gpu_memory_fraction
    allowed = int(memory.total * fraction)
    num_blocks = (allowed - taken) // needs.block_bytes
    if num_blocks >= 1:
        return num_blocks
    smallest = -(-100 * (taken + needs.block_bytes * needs.sequence_blocks) // memory.total) / 100
    remedy = f"set --gpu-memory-fraction {smallest:g}"
    if smallest > 1:
        remedy = "lower --max-batch-tokens or --max-num-seqs, free memory on the device, or use a smaller model"
    raise ConfigError(
        f"no memory is left for the KV cache: {fraction:g} of {_size(memory.total)} is {_size(allowed)}, weights take "
        f"{_size(memory.weights)}, a step's activations {_size(memory.activations)}, other use of the device "
        f"{_size(memory.others)}; {remedy}"
    )


def allocate(
    spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KvCaches:
    """Return keys and values [N, P, Hkv, D] per layer of a group, zeros. Raises ConfigError when memory runs out.

    All KV groups share these tensors: a block belongs to one group at a time, and holds the KV of that group's layers.

    Writing them makes the memory resident at the start (0.3 s per GiB on a CPU): what is too much fails here, not under
    load, and memory that grows later is a leak.
    """
    shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    try:
        return tuple(
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(KVLayout.of(spec.sliding_windows).layers_per_group)
        )
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError of the CPU allocator
        size = num_blocks * block_bytes(spec, dtype, block_size)
        raise ConfigError(
            f"a KV cache of {num_blocks * block_size} tokens ({_size(size)}) could not be allocated; "
            f"set a smaller --kv-cache-memory"
        ) from error


def _asked_blocks(config: CacheConfig, needs: CacheNeeds) -> int | None:
    if config.kv_cache_tokens is not None:
        return -(-config.kv_cache_tokens // config.block_size)
    if config.kv_cache_memory is None:
        return None
    num_blocks = parse_bytes(config.kv_cache_memory) // needs.block_bytes
    if num_blocks < 1:
        least = _flag_size(needs.block_bytes + _KIB - 1)
        raise ConfigError(
            f"--kv-cache-memory {config.kv_cache_memory} holds no KV block: {config.block_size} tokens of this model "
            f"take {_size(needs.block_bytes)}; set at least --kv-cache-memory {least}"
        )
    return num_blocks


def _check_fits(config: CacheConfig, needs: CacheNeeds, num_blocks: int, available: int) -> None:
    if num_blocks * needs.block_bytes <= available:
        return
    most = max(0, available) // needs.block_bytes
    by_tokens = config.kv_cache_tokens is not None
    flag = f"--kv-cache-tokens {config.kv_cache_tokens}" if by_tokens else f"--kv-cache-memory {config.kv_cache_memory}"
    if most < 1:
        remedy = "free memory or use a smaller model"
    elif by_tokens:
        remedy = f"set at most --kv-cache-tokens {most * config.block_size}"
    else:
        remedy = f"set at most --kv-cache-memory {_flag_size(most * needs.block_bytes)}"
    raise ConfigError(
        f"{flag} needs {_size(num_blocks * needs.block_bytes)}, but {_size(max(0, available))} are available after "
        f"loading the model; {remedy}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / _MIB:.1f} MiB"


def _flag_size(num_bytes: int) -> str:
    """A size as flags take it, rounded down to 1 MiB, or 1 KiB where it is small."""
    return f"{num_bytes // _MIB}MiB" if num_bytes >= 64 * _MIB else f"{num_bytes // _KIB}KiB"
