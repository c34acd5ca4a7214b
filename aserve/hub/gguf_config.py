"""A GGUF file's metadata as Hugging Face ``config.json`` and ``generation_config.json``.

Key names of GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Called by ``gguf_convert``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from aserve.core.errors import ModelLoadError
from aserve.hub.gguf_file import GgufFile

_ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),  # Mistral too: without a window it is the same computation
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""GGUF architecture to (Hugging Face architecture, model type)."""

_END_TOKENS = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>"})
"""Control tokens that end an answer wherever they are in a vocabulary, as in llama.cpp's llama-vocab.cpp."""

_CONTROL = 3  # token type

_GEMMA3_27B_LAYERS = 62

_LLAMA3_CONTEXT = 8192
"""Trained context of the Llama 3 models; their GGUF files hold only the resulting frequencies."""


def check_architecture(file: GgufFile) -> None:
    """Raises ModelLoadError for an architecture that cannot be converted."""
    if file.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelLoadError(f"{file.path} holds a {file.architecture} model; GGUF files of {known} can be converted")
    if file.integer("{arch}.expert_count", 0):
        raise ModelLoadError(f"{file.path} holds a mixture of experts, which cannot be converted from GGUF")


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the ``config.json`` of a file. Raises ModelLoadError."""
    architecture, model_type = _ARCHITECTURES[file.architecture]
    hidden = file.integer("{arch}.embedding_length")
    heads = file.integer("{arch}.attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.integer("{arch}.feed_forward_length"),
        "num_hidden_layers": file.integer("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer("{arch}.attention.head_count_kv", heads),
        "head_dim": file.integer("{arch}.attention.key_length", hidden // heads),
        "max_position_embeddings": file.integer("{arch}.context_length"),
        "rms_norm_eps": _short(file.number("{arch}.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16",
        "use_cache": True,
        "rope_parameters": _rope(file),
        **_token_ids(file),
    }
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if model_type == "llama":
        config["mlp_bias"] = False
    window = file.integer("{arch}.attention.sliding_window", 0)
    if model_type == "gemma3_text":
        return config | _gemma(config, window)
    config["hidden_act"] = "silu"
    if window:
        raise ModelLoadError(f"{file.path}: sliding windows of {file.architecture} cannot be converted from GGUF")
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the ``generation_config.json``: every id that ends an answer."""
    ids = _token_ids(file)
    tokens, kinds = file.items("tokenizer.ggml.tokens"), file.items("tokenizer.ggml.token_type")
    ends = [ids.get("eos_token_id"), file.find("tokenizer.ggml.eot_token_id"), file.find("tokenizer.ggml.eom_token_id")]
    ends += [
        n
        for n, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _END_TOKENS
    ]
    return {**ids, "eos_token_id": list(dict.fromkeys(i for i in ends if isinstance(i, int)))}


def _token_ids(file: GgufFile) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: file.find(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def _gemma(config: dict[str, Any], window: int) -> dict[str, Any]:
    """Settings that every Gemma 3 text model shares (its model card and transformers' configuration)."""
    layers = config["num_hidden_layers"]
    query_scalar = config["head_dim"]
    if layers == _GEMMA3_27B_LAYERS:  # GGUF has no key for it: llama.cpp, too, knows this one model by its layers
        query_scalar = config["hidden_size"] // config["num_attention_heads"]
    rope = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "attention_bias": False,
        "layer_types": ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(layers)],
        "query_pre_attn_scalar": query_scalar,
        "rope_parameters": rope,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }


def _short(value: float) -> float:
    """A float32 as the decimal number that was meant (1e-05, not 9.999999747378752e-06)."""
    return float(np.format_float_scientific(np.float32(value), unique=True))


def _rope(file: GgufFile) -> dict[str, Any]:
    theta = _short(file.number("{arch}.rope.freq_base", 10000.0))
    kind = file.text("{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return {"rope_theta": theta, **_llama3(file, theta)}
    factor = file.number("{arch}.rope.scaling.factor", 0.0)
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(f"{file.path}: rope scaling {kind} cannot be converted from GGUF")
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": kind, "factor": _short(factor)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.integer("{arch}.rope.scaling.original_context_length")
    return rope


def _llama3(file: GgufFile, theta: float) -> dict[str, Any]:
    """Recover Llama 3's scaling from the divisors that llama.cpp computed from it, and check that they agree."""
    divisors = file.tensors["rope_freqs.weight"].values().reshape(-1)
    factor = _short(float(divisors.max()))
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    expected: list[float] = []
    for n in range(len(divisors)):
        wavelength = 2 * math.pi * theta ** (n / len(divisors))
        smooth = (_LLAMA3_CONTEXT / wavelength - 1.0) / (4.0 - 1.0)
        smooth = min(1.0, max(0.0, smooth))
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelLoadError(f"{file.path}: its rope frequencies are not those of Llama 3 and cannot be converted")
    return rope
