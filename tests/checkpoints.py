"""Small random checkpoints of every family, written with transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_untied_biased": {
        "model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7, "tie_word_embeddings": False},
    "qwen2": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "gemma2": {
        "model_type": "gemma2", "sliding_window": 6, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 6, "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {
        "model_type": "phi3", "hidden_size": 96, "sliding_window": 9, "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
        "original_max_position_embeddings": 4,  # shorter than all texts: transformers' frequencies depend on the length
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 2.0],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 9.0, 16.0],
        },
    },
    "olmo2": {"model_type": "olmo2"},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.11,
        "logits_scaling": 5.0, "attention_bias": True, "mlp_bias": True,
    },
    "glm": {"model_type": "glm"},
    "glm4": {"model_type": "glm4"},
    "cohere": {"model_type": "cohere", "attention_bias": True},
    "cohere_qk_norm": {"model_type": "cohere", "use_qk_norm": True},
    "cohere2": {"model_type": "cohere2", "sliding_window": 6, "num_hidden_layers": 5},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 8},
    "mixtral": {"model_type": "mixtral", "sliding_window": 10},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 11,
    },
}  # fmt: skip


def write_checkpoint(folder: Path, settings: Mapping[str, Any], **options: Any) -> Path:
    """Write a random model; weights are large enough for every part to matter."""
    values = {**SIZES, **settings}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
                if "gemma" in config.model_type:  # they scale by 1 + weight
                    parameter.sub_(1)
            elif "embed" in name and "gemma" in config.model_type:  # or a token would only predict itself
                parameter.normal_(0.0, 0.05)
            else:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder, **options)
    return folder
