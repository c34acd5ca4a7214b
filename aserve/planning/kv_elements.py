"""How many bytes keys and values take, by layout of the layers and type of the elements."""

from __future__ import annotations

from dataclasses import dataclass

from aserve.core.kv_layout import KVLayout
from aserve.core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KvElements:
    """A type of stored keys and values.

    Attributes:
        name: as a flag would have it.
        bits: of one element.
        vector_bytes: for each key and each value of a head, beside its elements: scale and zero point.
    """

    name: str
    bits: int
    vector_bytes: int = 0

    def token_bytes(self, spec: ModelSpec, ranks: int = 1) -> int:
        """Bytes of one token in all layers of one block, on each of ``ranks`` devices."""
        vector = spec.head_dim * self.bits // 8 + self.vector_bytes
        num_layers = KVLayout.of(spec.sliding_windows).layers_per_group
        return 2 * num_layers * max(1, spec.num_kv_heads // ranks) * vector


def plain_elements(dtype: str) -> KvElements:
    """Keys and values as they are computed, in the model's dtype."""
    return KvElements(dtype, 32 if dtype == "float32" else 16)


QUANTIZED: tuple[KvElements, ...] = (KvElements("fp8", 8), KvElements("int8", 8, 4), KvElements("int4", 4, 4))
"""fp8 with one scale for the whole cache; int8 and int4 with a scale and a zero point of 16 bits for each vector."""
