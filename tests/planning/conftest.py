"""Published sizes of models, and sizings over invented devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aserve.core.config import CacheConfig
from aserve.core.memory import MemoryUse
from aserve.core.model_spec import ModelSpec
from aserve.planning.kv_size import Sizing
from aserve.planning.limits import Limits

GIB = 2**30
COMMON = {"vocab_size": 152192, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "dtype": "bfloat16"}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2-7b": {
        **COMMON, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 18944,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **COMMON, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "llama3-8b": {
        **COMMON, "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    # DeepSeek-R1-Distill-Qwen-32B, quantised by AWQ
    "qwen2-32b-awq": {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 5120, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 27648, "tie_word_embeddings": False,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "torch_dtype": "float16",
        "quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None,
        },
    },
    "gemma2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "sliding_window": 4096, "dtype": "bfloat16",
    },
    "gemma3-4b": {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262208, "hidden_size": 2560, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10240,
        "max_position_embeddings": 131072, "sliding_window": 1024, "dtype": "bfloat16",
        "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "sliding_window": 4096, "dtype": "bfloat16",
    },
    "phi4": {
        "architectures": ["Phi3ForCausalLM"], "vocab_size": 100352, "hidden_size": 5120, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 10, "intermediate_size": 17920,
        "max_position_embeddings": 16384, "rope_theta": 250000, "sliding_window": None, "dtype": "bfloat16",
    },
    "olmo2-7b": {
        "architectures": ["Olmo2ForCausalLM"], "vocab_size": 100352, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "dtype": "float32",
    },
    "glm4-9b": {
        "architectures": ["Glm4ForCausalLM"], "vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "intermediate_size": 13696, "dtype": "bfloat16",
        "max_position_embeddings": 32768,
    },
    "command-r-plus": {
        "architectures": ["CohereForCausalLM"], "vocab_size": 256000, "hidden_size": 12288, "num_hidden_layers": 64,
        "num_attention_heads": 96, "num_key_value_heads": 8, "intermediate_size": 33792, "use_qk_norm": True,
        "max_position_embeddings": 131072, "rope_theta": 75000000.0, "logit_scale": 0.8333, "dtype": "float16",
    },
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"], "vocab_size": 49152, "hidden_size": 3072, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "intermediate_size": 12288, "sliding_window": 4096,
        "max_position_embeddings": 16384, "dtype": "float32",
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "dtype": "bfloat16",
        "max_position_embeddings": 32768,
    },
    "qwen2-moe-57b": {
        "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "num_experts": 64,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480,
        "max_position_embeddings": 32768, "dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "max_position_embeddings": 40960, "dtype": "bfloat16",
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def configs() -> dict[str, dict[str, Any]]:
    return CONFIGS


@pytest.fixture(scope="session")
def specs() -> dict[str, ModelSpec]:
    return {name: ModelSpec.from_hf(config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="session")
def make_limits() -> Callable[..., Limits]:
    def make(**changes: int) -> Limits:
        defaults = {"max_num_seqs": 256, "max_batch_tokens": 8192, "max_in_flight": 2, "max_model_len": 16000}
        return Limits(**{**defaults, **changes})

    return make


@pytest.fixture(scope="session")
def make_sizing(specs: dict[str, ModelSpec], make_limits: Callable[..., Limits]) -> Callable[..., Sizing]:
    """A sizing in which a token takes 64 KiB and a block of 16 tokens 1 MiB, and a step 64 KiB a token."""

    def make(
        *, total: int = 100 * GIB, others: int = GIB, weights: int = 16 * GIB, on_gpu: bool = True,
        model: str = "llama3-8b", limits: dict[str, int] | None = None, **cache: Any,
    ) -> Sizing:  # fmt: skip
        def memory_of(limits: Limits) -> MemoryUse:
            step = limits.max_batch_tokens * 2**16 + limits.max_num_seqs * 2**20
            return MemoryUse(
                device="a GPU", on_gpu=on_gpu, total=total, others=others, weights=weights, activations=step
            )

        return Sizing(
            cache=CacheConfig(**cache),
            limits=make_limits(**(limits or {})),
            spec=specs[model],
            token_bytes=2**16,
            memory_of=memory_of,
        )

    return make
