"""Writing to the paged cache on the CPU; the contract is ``kernel_set.StoreKv``."""

from __future__ import annotations

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy token t to cache row ``slot_mapping[t]``, unless that is negative."""
    if int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        slot_mapping, k, v = slot_mapping[kept], k[kept], v[kept]
    for x, cache in ((k, k_cache), (v, v_cache)):
        cache.flatten(0, 1).index_copy_(0, slot_mapping, x)
