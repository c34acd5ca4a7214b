"""Host memory behind the KV cache: the copies that the scheduler's plans ask for.

Which block is kept and where is the scheduler's decision; here are the memory and the copying. A block lies in one
piece on the host, all layers of its group together, so that a copy over the bus is long: blocks are gathered on the
device into a staging buffer with one operation per tensor, and cross the bus in runs of neighbouring slots. On CUDA the
host's part is page-locked, and everything is queued on the stream of the steps, whose order is all that keeps a copy
and a step apart. Owned by the executor, on the step thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any
from weakref import finalize

import numpy as np
import torch

from aserve.core.capacity import Capacity
from aserve.core.config import parse_bytes
from aserve.core.errors import ConfigError
from aserve.core.step import BlockCopy, StepPlan
from aserve.runtime.kv_cache import KvCaches
from aserve.runtime.transfer import to_device

STAGING_BYTES = 32 * 2**20
"""Of the device, for copies on their way: a large restore goes through it in parts."""


def count_host_blocks(host_cache_memory: str | None, *, block_bytes: int, available: int) -> int:
    """Return how many blocks the flag asks for. Raises ConfigError if it holds none, or more than ``available``."""
    if host_cache_memory is None:
        return 0
    asked = parse_bytes(host_cache_memory)
    if asked < block_bytes:
        least = -(-block_bytes // 1024)
        raise ConfigError(
            f"--host-cache-memory {host_cache_memory} holds no KV block; set at least --host-cache-memory {least}KiB"
        )
    if asked > available:
        raise _too_large(host_cache_memory, available)
    return asked // block_bytes


def _too_large(host_cache_memory: str | int, available: int) -> ConfigError:
    return ConfigError(
        f"--host-cache-memory {host_cache_memory} is more than the {max(0, available) // 2**20} MiB of host memory "
        f"that can be had for it; lower it"
    )


class HostTier:
    """Room for ``num_blocks`` blocks of a KV cache."""

    def __init__(self, caches: KvCaches, num_blocks: int, *, staging_bytes: int = STAGING_BYTES) -> None:
        """Allocate. Raises ConfigError when the host does not have the memory, or may not lock so much of it."""
        self._tensors = [tensor.flatten(1) for pair in caches for tensor in pair]  # each [N, E]
        example = self._tensors[0]
        block = (len(self._tensors), example.shape[1])
        block_bytes = block[0] * block[1] * example.element_size()
        self._device = example.device
        self._chunk = max(1, min(num_blocks, staging_bytes // block_bytes))
        try:
            self._staging = torch.empty((self._chunk, *block), dtype=example.dtype, device=self._device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"{self._device} has no {self._chunk * block_bytes // 2**20 + 1} MiB left for copies to the host; "
                f"leave --host-cache-memory out, or make the KV cache smaller"
            ) from None
        try:
            # Written, so the memory is resident from the start: what is too much fails here, not under load.
            self._host = torch.zeros((num_blocks, *block), dtype=example.dtype, device="cpu")
        except RuntimeError:
            raise _too_large(num_blocks * block_bytes, 0) from None
        self._unlock: Callable[[], object] | None = None
        if self._device.type == "cuda":
            self._lock()

    def extend(self, capacity: Capacity) -> Capacity:
        """Return the capacity with these blocks, and the memory that they take, in it."""
        memory = capacity.memory
        if memory is not None:
            memory = replace(memory, host_kv=self._host.nbytes)
        return replace(capacity, num_host_blocks=len(self._host), memory=memory)

    def close(self) -> None:
        """Let go of the page lock; nothing may be copied afterwards. Idempotent."""
        if self._unlock is not None:
            torch.cuda.current_stream(self._device).synchronize()
            self._unlock()
            self._unlock = None

    @torch.inference_mode()
    def copy(self, plan: StepPlan) -> None:
        """Queue the plan's saves, then its restores, before its rows. On the CPU this performs them."""
        for copies in _chunks(plan.saves, self._chunk):
            (block_ids,) = to_device((_block_ids(copies),), self._device)
            for index, tensor in enumerate(self._tensors):
                torch.index_select(tensor, 0, block_ids, out=self._staging[: len(copies), index])
            for staged, slots in _runs(copies):
                self._host[slots].copy_(self._staging[staged], non_blocking=True)
        for copies in _chunks(plan.restores, self._chunk):
            (block_ids,) = to_device((_block_ids(copies),), self._device)
            for staged, slots in _runs(copies):
                self._staging[staged].copy_(self._host[slots], non_blocking=True)
            for index, tensor in enumerate(self._tensors):
                tensor.index_copy_(0, block_ids, self._staging[: len(copies), index])

    def _lock(self) -> None:
        """Lock the pages. torch's own pinned memory comes in powers of two, which can be twice as much."""
        size = self._host.nbytes
        error = int(_cudart().cudaHostRegister(self._host.data_ptr(), size, 0))
        if error:
            _forget_error(self._device)
            raise ConfigError(
                f"the system does not lock {size // 2**20} MiB of memory for --host-cache-memory (CUDA error {error}); "
                f"lower it, or raise the limit on locked memory (ulimit -l)"
            )
        # Also when nobody closes: memory that is freed while it is locked keeps its addresses from being locked again.
        self._unlock = finalize(self, _cudart().cudaHostUnregister, self._host.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()


def _forget_error(device: torch.device) -> None:
    """Have CUDA tell its last error now: it would be told to the next operation otherwise, which is not at fault."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).zero_()
        torch.cuda.current_stream(device).synchronize()


def _chunks(copies: Sequence[BlockCopy], size: int) -> Iterator[list[BlockCopy]]:
    """Split in the order of slots, so that neighbours stay together."""
    ordered = sorted(copies, key=lambda copy: copy.host_slot)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _block_ids(copies: list[BlockCopy]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.fromiter((copy.block_id for copy in copies), np.int64, len(copies))


def _runs(copies: list[BlockCopy]) -> Iterator[tuple[slice, slice]]:
    """Yield (places in the staging buffer, slots) of neighbouring slots."""
    slots = [copy.host_slot for copy in copies]
    starts = [0, *(n for n in range(1, len(slots)) if slots[n] != slots[n - 1] + 1), len(slots)]
    for start, end in pairwise(starts):
        yield slice(start, end), slice(slots[start], slots[start] + end - start)
