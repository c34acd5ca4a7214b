"""Writing to the paged cache in plain torch; the contract is ``kernel_set.StoreKv``."""

from __future__ import annotations

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy token t to cache row ``slot_mapping[t]``, unless that is negative."""
    kept = slot_mapping >= 0
    rows = slot_mapping[kept]
    k_cache.flatten(0, 1)[rows] = k[kept]
    v_cache.flatten(0, 1)[rows] = v[kept]
