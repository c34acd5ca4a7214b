"""What differs between the architectures' readings of ``config.json``: one row for each.

Defaults for absent keys are those of transformers 5 (``models/*/configuration_*.py``). Called by ``model_spec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Activation = Literal["silu", "gelu_tanh"]
Block = Literal["pre", "sandwich", "post", "parallel"]
"""Where a layer's norms are: before attention and MLP; before and after; after; one before both, in parallel."""
Norm = Literal["rms", "layer", "layer_with_bias"]
QkNorm = Literal["none", "head", "whole", "layer_by_head"]
"""Norms of queries and keys: none, RMS over a head with one weight for all, RMS over all heads together, and layer norm
over a head with a weight for each."""
Windows = Literal["none", "all", "all_if_used", "by_layer", "pattern"]
Experts = Literal["none", "mixtral", "qwen"]

SILU: Mapping[str, Activation] = {"silu": "silu", "swish": "silu"}
GELU_TANH: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}


class Family(NamedTuple):
    """One architecture.

    Attributes:
        defaults: of keys that are absent.
        qkv_bias, output_bias, mlp_bias: the key that decides, or whether there is one.
        windows: of all layers, of all if ``use_sliding_window`` says so, of layers that the config lists, or of all but
            every so many.
        gemma: norms scale by 1 + weight, embeddings by sqrt(hidden size), scores and logits may be capped.
        two_ropes: layers with a window have a rope of their own, as the config describes it.
        window_rope_only: layers without a window have no rope at all.
        block, norm, qk_norm: see their types.
        eps_key: key of the norms' epsilon.
        activation_key, activations: key of the MLP's activation, and its values; the first is the default.
        gated: whether the MLP multiplies two projections.
        partial_rope: whether ``partial_rotary_factor`` is honoured.
        interleaved_rope: whether channels 2i and 2i + 1 are rotated together, and not i and i + half.
        grouped_qkv: whether the fused projection has the rows of each KV head together: its queries, key, value.
        multipliers: whether embeddings, residuals, scores and logits are scaled by keys of Granite.
        logit_scale: whether ``logit_scale`` multiplies logits.
        experts: keys by which layers with experts are described.
    """

    defaults: Mapping[str, Any] = {}
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    windows: Windows = "none"
    gemma: bool = False
    two_ropes: bool = False
    window_rope_only: bool = False
    block: Block = "pre"
    norm: Norm = "rms"
    qk_norm: QkNorm = "none"
    eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    activations: Mapping[str, Activation] = SILU
    gated: bool = True
    partial_rope: bool = False
    interleaved_rope: bool = False
    grouped_qkv: bool = False
    multipliers: bool = False
    logit_scale: bool = False
    experts: Experts = "none"


_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": 1,
}
_GEMMA2 = Family(
    {
        **_GEMMA_DEFAULTS,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    windows="pattern",
    gemma=True,
    block="sandwich",
    activation_key="hidden_activation",
    activations=GELU_TANH,
)
_GEMMA3 = _GEMMA2._replace(
    # The first published configs of Gemma 3 leave out whatever transformers has a default for.
    defaults={**_GEMMA_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
    qk_norm="head",
    two_ropes=True,
)
_GLM = Family(
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    output_bias=False,
    partial_rope=True,
    interleaved_rope=True,
)
_GRANITE = Family(mlp_bias="mlp_bias", multipliers=True)
_COHERE = Family(
    {"tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5, "rope_theta": 500000.0},
    block="parallel",
    norm="layer",
    eps_key="layer_norm_eps",
    interleaved_rope=True,
    logit_scale=True,
)
_QWEN_DEFAULTS: Mapping[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096}
_QWEN2 = Family(_QWEN_DEFAULTS, qkv_bias=True, output_bias=False, windows="by_layer")
_QWEN3 = Family({**_QWEN_DEFAULTS, "head_dim": 128}, windows="by_layer", qk_norm="head")

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(
        {"num_key_value_heads": 8, "sliding_window": 4096}, qkv_bias=False, output_bias=False, windows="all"
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Family(
        {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        qkv_bias=False,
        output_bias=False,
        windows="all",
        partial_rope=True,
    ),
    "Olmo2ForCausalLM": Family({"rms_norm_eps": 1e-5}, block="post", qk_norm="whole"),
    "GraniteForCausalLM": _GRANITE,
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM._replace(block="sandwich"),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": _COHERE._replace(
        defaults={**_COHERE.defaults, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        windows="pattern",
        window_rope_only=True,
    ),
    "Starcoder2ForCausalLM": Family(
        {"num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True},
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        windows="all",
        norm="layer_with_bias",
        eps_key="norm_epsilon",
        activations=GELU_TANH,
        gated=False,
    ),
    "InternLM2ForCausalLM": Family({"bias": True}, qkv_bias="bias", output_bias="bias", grouped_qkv=True),
    "InternLM3ForCausalLM": Family(
        {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "bias": False, "qkv_bias": False},
        qkv_bias="qkv_bias",
        output_bias="bias",
        mlp_bias="bias",
    ),
    "MixtralForCausalLM": Family(
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        qkv_bias=False,
        output_bias=False,
        windows="all",
        experts="mixtral",
    ),
    "Qwen2MoeForCausalLM": _QWEN2._replace(
        defaults={
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
        qkv_bias="qkv_bias",
        experts="qwen",
    ),
    "Qwen3MoeForCausalLM": _QWEN3._replace(
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        windows="all_if_used",
        experts="qwen",
    ),
}
