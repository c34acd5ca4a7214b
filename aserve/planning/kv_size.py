"""How many blocks the KV cache gets, and what to change when that is too few or too many.

Pure arithmetic over a ``Sizing``: its copies with one setting changed are what a flag would do, so every advice in a
message has been computed by the function that will judge it. Called at the start of a server and by ``aserve plan``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from aserve.core.capacity import Capacity
from aserve.core.config import CacheConfig, parse_bytes
from aserve.core.errors import ConfigError
from aserve.core.kv_layout import KVLayout
from aserve.core.memory import MemoryUse
from aserve.core.model_spec import ModelSpec
from aserve.planning.limits import Limits
from aserve.planning.parity import parity_context
from aserve.planning.sizes import show_size

DEFAULT_CPU_BYTES = 2**30
DEFAULT_GPU_FRACTION = 0.9
USABLE_TOKENS = 256
"""A cache whose size nobody asked for holds at least a request of so many tokens, or the start fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """All that the size of a KV cache follows from.

    Attributes:
        token_bytes: KV of one token in the layers of one block.
        memory_of: the device under these limits, without a KV cache.
        in_half: the same with ``--dtype bfloat16``; None where that would change nothing.
    """

    cache: CacheConfig
    limits: Limits
    spec: ModelSpec
    token_bytes: int
    memory_of: Callable[[Limits], MemoryUse]
    in_half: Sizing | None = None

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.cache.block_size

    def capacity(self, num_blocks: int) -> Capacity:
        """What an executor with so many blocks can hold. Needs one block per KV group at least."""
        return Capacity(
            num_blocks=num_blocks,
            block_size=self.cache.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            max_batch_tokens=self.limits.max_batch_tokens,
            max_model_len=self.limits.max_model_len,
            max_in_flight=self.limits.max_in_flight,
            vocab_size=self.spec.vocab_size,
            windows=KVLayout.of(self.spec.sliding_windows).windows,
            parity_context=parity_context(self.spec),
        )

    def memory_with(self, capacity: Capacity) -> MemoryUse:
        """Where the memory goes when there is a KV cache of this capacity."""
        return replace(
            self.memory_of(self.limits),
            kv_cache=capacity.num_blocks * self.block_bytes,
            host_kv=capacity.num_host_blocks * self.block_bytes,
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks in which one request of this length can run."""
        return self.capacity(2**62).num_blocks_for(num_tokens)

    def blocks_of_tokens(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens for all layers."""
        num_groups = len(KVLayout.of(self.spec.sliding_windows).groups)
        return -(-num_tokens // self.cache.block_size) * num_groups


def count_blocks(sizing: Sizing) -> int:
    """Return the number of blocks. Raises TooLittleMemoryError, which says what there is and what it is needed for.

    What was asked for is taken if it fits. Default on a GPU: what ``gpu_memory_fraction`` (0.9) of the whole device
    leaves beside weights, activations and others. Default on a CPU: enough for ``max_num_seqs`` requests of full
    length, but at most 1 GiB and a quarter of what is available, and at least one such request where half of the
    available memory holds it.
    """
    cache, memory = sizing.cache, sizing.memory_of(sizing.limits)
    if cache.gpu_memory_fraction is not None and not memory.on_gpu:
        raise ConfigError("--gpu-memory-fraction needs a GPU; on the CPU use --kv-cache-memory or --kv-cache-tokens")
    asked = _asked_blocks(sizing)
    if asked is not None:
        _check_asked(sizing, asked, memory)
        return asked
    num_blocks = _share_of_gpu(sizing, memory) if memory.on_gpu else _share_of_host(sizing, memory)
    least = sizing.blocks_for(min(sizing.limits.max_model_len, USABLE_TOKENS))
    if num_blocks < least:
        raise TooLittleMemoryError(_no_room(sizing, memory, least))
    return num_blocks


class TooLittleMemoryError(ConfigError):
    """The KV cache that was asked for, or any usable one, does not fit."""


def _share_of_gpu(sizing: Sizing, memory: MemoryUse) -> int:
    return (_allowed(sizing.cache, memory) - memory.taken) // sizing.block_bytes


def _share_of_host(sizing: Sizing, memory: MemoryUse) -> int:
    sequence = sizing.blocks_for(sizing.limits.max_model_len)
    most = min(DEFAULT_CPU_BYTES, memory.available // 4) // sizing.block_bytes
    least = min(sequence, memory.available // 2 // sizing.block_bytes)
    return max(least, min(sequence * sizing.limits.max_num_seqs, most))


def _allowed(cache: CacheConfig, memory: MemoryUse) -> int:
    return int(memory.total * (cache.gpu_memory_fraction or DEFAULT_GPU_FRACTION))


def _asked_blocks(sizing: Sizing) -> int | None:
    if sizing.cache.kv_cache_tokens is not None:
        return sizing.blocks_of_tokens(sizing.cache.kv_cache_tokens)
    if sizing.cache.kv_cache_memory is not None:
        return parse_bytes(sizing.cache.kv_cache_memory) // sizing.block_bytes
    return None


def _check_asked(sizing: Sizing, asked: int, memory: MemoryUse) -> None:
    cache, least = sizing.cache, sizing.blocks_for(1)
    if asked < least:
        raise TooLittleMemoryError(
            f"--kv-cache-memory {cache.kv_cache_memory} holds no KV block: {cache.block_size} tokens of this model "
            f"take {show_size(least * sizing.block_bytes)}"
        )
    if asked * sizing.block_bytes > memory.available:
        name, value = "memory", cache.kv_cache_memory
        if cache.kv_cache_tokens is not None:
            name, value = "tokens", str(cache.kv_cache_tokens)
        needed = show_size(asked * sizing.block_bytes)
        raise TooLittleMemoryError(f"--kv-cache-{name} {value} needs {needed}, but {_room(memory)}: {_uses(memory)}")


def _no_room(sizing: Sizing, memory: MemoryUse, least: int) -> str:
    tokens = min(sizing.limits.max_model_len, USABLE_TOKENS)
    needed = f"{show_size(least * sizing.block_bytes)}, which {tokens} tokens take"
    if memory.on_gpu:
        allowed = _allowed(sizing.cache, memory)
        fraction = sizing.cache.gpu_memory_fraction or DEFAULT_GPU_FRACTION
        room = f"{fraction:g} of {show_size(memory.total)} is {show_size(allowed)}, {_uses(memory)}"
        return f"no memory is left for a KV cache of {needed}: {room}"
    return f"no memory is left for a KV cache of {needed}: {_room(memory)}, {_uses(memory)}"


def _room(memory: MemoryUse) -> str:
    return f"{show_size(memory.available)} of {show_size(memory.total)} are available"


def _uses(memory: MemoryUse) -> str:
    graphs = f", CUDA graphs {show_size(memory.graphs)}" if memory.graphs else ""
    driver = " and the driver" if memory.on_gpu else ""
    return (
        f"weights take {show_size(memory.weights)}, a step's activations "
        f"{show_size(memory.activations)}{graphs}, other programs{driver} {show_size(memory.others)}"
    )


def with_cache(sizing: Sizing, **changes: object) -> Sizing:
    """A copy with other settings of the cache; the sizes that are not named stay unset if one of them is set."""
    sizes = dict.fromkeys(("kv_cache_tokens", "kv_cache_memory", "gpu_memory_fraction"))
    return replace(sizing, cache=replace(sizing.cache, **{**sizes, **changes}))
