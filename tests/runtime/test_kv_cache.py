"""The tensors of the KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aserve.core.errors import ConfigError
from aserve.core.model_spec import ModelSpec
from aserve.runtime.kv_cache import allocate, block_bytes

SPEC = ModelSpec.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
)


def test_block_bytes() -> None:
    assert block_bytes(SPEC, torch.bfloat16, 16) == 2 * 3 * 16 * 2 * 16 * 2
    assert block_bytes(SPEC, torch.float32, 8) == 2 * 3 * 8 * 2 * 16 * 4


def test_allocate() -> None:
    caches = allocate(SPEC, num_blocks=5, block_size=8, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert len(caches) == 3
    assert {(t.shape, t.dtype) for pair in caches for t in pair} == {((5, 8, 2, 16), torch.bfloat16)}


def test_allocation_failure_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"KV cache of 800000000000000 tokens .* set a smaller --kv-cache-memory"):
        allocate(SPEC, num_blocks=10**14, block_size=8, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_a_failure_counts_tokens_of_all_groups_and_names_the_flag_that_was_given() -> None:
    spec = replace(SPEC, sliding_windows=(None, 8, 8))
    with pytest.raises(ConfigError, match=r"of 266666666666664 tokens .* set a smaller --kv-cache-tokens"):
        allocate(
            spec,
            num_blocks=10**14,
            block_size=8,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            flag="--kv-cache-tokens",
        )
