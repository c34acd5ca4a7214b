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
