"""The paged KV cache: its tensors.

How many blocks there are is decided in ``aserve.planning``, which block belongs to whom by the scheduler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.core.errors import ConfigError
from aserve.core.kv_layout import KVLayout
from aserve.core.model_spec import ModelSpec
from aserve.planning.sizes import show_size

KvCaches = tuple[tuple[Tensor, Tensor], ...]


def block_bytes(spec: ModelSpec, dtype: torch.dtype, block_size: int) -> int:
    """Return the bytes of one block: keys and values of ``block_size`` tokens in the layers of one KV group."""
    num_layers = KVLayout.of(spec.sliding_windows).layers_per_group
    return 2 * num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def allocate(
    spec: ModelSpec,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    flag: str = "--kv-cache-memory",
) -> KvCaches:
    """Return keys and values [N, P, Hkv, D] per layer of a group, zeros. Raises ConfigError when memory runs out.

    All KV groups share these tensors: a block belongs to one group at a time, and holds the KV of that group's layers.

    Writing them makes the memory resident at the start (0.3 s per GiB on a CPU): what is too much fails here, not under
    load, and memory that grows later is a leak.

    Args:
        flag: The setting to lower when there is no memory.
    """
    shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    try:
        return tuple(
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(KVLayout.of(spec.sliding_windows).layers_per_group)
        )
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError of the CPU allocator
        size = num_blocks * block_bytes(spec, dtype, block_size)
        num_tokens = num_blocks // len(KVLayout.of(spec.sliding_windows).groups) * block_size
        raise ConfigError(
            f"a KV cache of {num_tokens} tokens ({show_size(size)}) could not be allocated; set a smaller {flag}"
        ) from error
