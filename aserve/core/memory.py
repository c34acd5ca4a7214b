"""Where the memory of the device goes: numbers that the start prints and that ``/metrics`` repeats.

Made by whoever sizes the KV cache; nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one device, or of the host where the model runs on the CPU.

    Attributes:
        device: its name, for people.
        on_gpu: whether it is a GPU; else all numbers are of host memory.
        total: all that the device has.
        others: what other processes hold, on a GPU with this process's driver context and loaded kernels.
        weights: the model, with tables that are computed from its config.
        activations: what the largest step takes beside weights and KV, and the state of sampling.
        graphs: captured steps.
        kv_cache: keys and values.
        host_kv: host memory for keys and values that had to leave the cache.
    """

    device: str
    on_gpu: bool
    total: int
    others: int
    weights: int
    activations: int
    graphs: int = 0
    kv_cache: int = 0
    host_kv: int = 0

    @property
    def taken(self) -> int:
        """All but the KV cache."""
        return self.others + self.weights + self.activations + self.graphs

    @property
    def available(self) -> int:
        """What the KV cache could have at most; never negative."""
        return max(0, self.total - self.taken)

    @property
    def unused(self) -> int:
        """What is left when all KV is allocated."""
        if self.on_gpu:
            return self.available - self.kv_cache
        return max(0, self.available - self.kv_cache - self.host_kv)  # others may have taken some of it since
