"""Converted GGUF files compute what the original would, and say so in their configuration."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from aserve.core.errors import ModelLoadError
from aserve.core.model_spec import ModelSpec
from aserve.hub.gguf_config import model_config
from aserve.hub.gguf_convert import convert_gguf
from aserve.hub.gguf_file import GgufFile

QWEN = {"rope.freq_base": 1000000.0, "attention.layer_norm_rms_epsilon": 1e-6}


def convert(path: Path, **options: Any) -> Path:
    folder = path.parent / "model"
    folder.mkdir(exist_ok=True)
    convert_gguf(path, folder, **options)
    return folder


def permute(rows: torch.Tensor, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py stores query and key rows."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
        .contiguous()
        .numpy()
    )


def gguf_name(name: str, family: str) -> str:
    """The GGUF name of a Hugging Face weight."""
    norms = (
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
        if family == "gemma3"
        else {"post_attention_layernorm": "ffn_norm"}
    )
    table = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
        **norms,
    }
    for old, new in table.items():
        name = name.replace(old, new)
    return name


def original(family: str, vocab_size: int, **changes: Any) -> Any:
    """A random model of transformers whose weights bfloat16 holds exactly."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    model_type = "gemma3_text" if family == "gemma3" else family
    config = AutoConfig.for_model(
        model_type,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        **changes,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter).mul(0.2).bfloat16().float())
    return model


def tensors_of(model: Any, family: str) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        heads = {"q": 4, "k": 2}.get(name.split("self_attn.")[-1][0]) if "proj" in name else None
        if family == "llama" and heads is not None and "self_attn" in name:
            tensors[gguf_name(name, family)] = permute(value, heads)
        else:
            tensors[gguf_name(name, family)] = (value + (family == "gemma3" and "norm" in name)).numpy()
    return tensors


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # family: settings of transformers' configuration, keys of the GGUF file
    "llama": ({"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}, {}),
    "qwen2": ({"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}, QWEN),
    "qwen3": (
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
        {**QWEN, "attention.key_length": 16},
    ),
    "gemma3": (
        {"rms_norm_eps": 1e-6, "sliding_window": 8, "query_pre_attn_scalar": 16},
        {**QWEN, "attention.key_length": 16, "attention.sliding_window": 8},
    ),
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_same_logits_as_the_original(gguf: Any, tmp_path: Path, family: str) -> None:
    vocabulary = gguf.byte_level("qwen2")
    settings, keys = FAMILIES[family]
    model = original(family, len(vocabulary.tokens), **settings)
    path = gguf.write_gguf(tmp_path / "m.gguf", family, gguf.LLAMA | keys, tensors_of(model, family), vocabulary)
    converted = AutoModelForCausalLM.from_pretrained(convert(path), dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(40)[None] * 5 % len(vocabulary.tokens)
    with torch.no_grad():
        expected, got = model(ids).logits, converted(ids).logits
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights(gguf: Any, tmp_path: Path, kind: str) -> None:
    vocabulary = gguf.byte_level()
    tensors = gguf.llama_tensors(len(vocabulary.tokens))
    names = ["blk.1.ffn_up.weight", "token_embd.weight"]
    path = gguf.write_gguf(
        tmp_path / "m.gguf", "llama", gguf.LLAMA, tensors, vocabulary, kinds=dict.fromkeys(names, kind)
    )
    weights = load_file(convert(path) / "model.safetensors")
    for name, target in zip(names, ["model.layers.1.mlp.up_proj", "model.embed_tokens"], strict=True):
        kind_number = GGMLQuantizationType[kind]
        expected = torch.from_numpy(dequantize(quantize(tensors[name], kind_number), kind_number))
        assert torch.equal(weights[f"{target}.weight"], expected.bfloat16())


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants(gguf: Any, tmp_path: Path, kind: str) -> None:
    """gguf cannot make them, so blocks are random bytes, with scales that are sound numbers."""
    from gguf.constants import GGML_QUANT_SIZES

    number = GGMLQuantizationType[kind]
    block_size, num_bytes = GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 60, (256, num_bytes), dtype=np.uint8)
    blocks = blocks.reshape(-1, num_bytes)
    vocabulary = gguf.byte_level()
    tensors = gguf.llama_tensors(len(vocabulary.tokens))
    numbers = gguf.LLAMA | {"embedding_length": 256}
    del tensors["blk.0.ffn_gate.weight"]

    def add(writer: Any) -> None:
        writer.add_tensor("blk.0.ffn_gate.weight", blocks, raw_dtype=number)

    path = gguf.write_gguf(tmp_path / "m.gguf", "llama", numbers, tensors, vocabulary, extra=add)
    weights = load_file(convert(path) / "model.safetensors")
    expected = torch.from_numpy(dequantize(blocks, number)).bfloat16()
    assert expected.shape == (256, block_size)
    assert torch.equal(weights["model.layers.0.mlp.gate_proj.weight"], expected)


def test_configuration_of_a_llama(gguf: Any, tmp_path: Path) -> None:
    vocabulary = gguf.byte_level()
    tensors = gguf.llama_tensors(len(vocabulary.tokens), tied=True)
    seen: list[tuple[int, int]] = []
    folder = convert(
        gguf.write_gguf(tmp_path / "m.gguf", "llama", gguf.LLAMA, tensors, vocabulary),
        progress=lambda done, total: seen.append((done, total)),
    )
    config = json.loads((folder / "config.json").read_text())
    assert (
        config.items()
        >= {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 266,
            "hidden_size": 64,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "bos_token_id": 1,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        }.items()
    )
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in tensors.values())


def rope_of(gguf: Any, tmp_path: Path, numbers: dict[str, Any], **tensors: np.ndarray) -> dict[str, Any]:
    vocabulary = gguf.byte_level()
    every = gguf.llama_tensors(len(vocabulary.tokens)) | {f"{k}.weight": v for k, v in tensors.items()}
    path = gguf.write_gguf(tmp_path / "m.gguf", "llama", gguf.LLAMA | numbers, every, vocabulary)
    return json.loads((convert(path) / "config.json").read_text())["rope_parameters"]


def test_rope_scaling(gguf: Any, tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert rope_of(gguf, tmp_path, linear) == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 32}
    assert rope_of(gguf, tmp_path, yarn)["original_max_position_embeddings"] == 32
    with pytest.raises(ModelLoadError, match="rope scaling longrope cannot be converted"):
        rope_of(gguf, tmp_path, linear | {"rope.scaling.type": "longrope"})


def test_llama_3_rope_is_recovered(gguf: Any, tmp_path: Path) -> None:
    """The divisors are computed as transformers computes the scaled frequencies."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = AutoConfig.for_model("llama", head_dim=16, rope_parameters=rope)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    plain = 1 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / scaled).numpy()
    assert math.isclose(divisors.max(), 32.0, rel_tol=1e-5)
    assert rope_of(gguf, tmp_path, {"rope.freq_base": 500000.0}, rope_freqs=divisors) == rope
    with pytest.raises(ModelLoadError, match="not those of Llama 3"):
        rope_of(gguf, tmp_path, {"rope.freq_base": 500000.0}, rope_freqs=divisors[::-1].copy())


@pytest.mark.parametrize(("num_layers", "scalar"), [(18, 32), (62, 16)])
def test_configuration_of_a_gemma(gguf: Any, tmp_path: Path, num_layers: int, scalar: int) -> None:
    """Of 62 layers is the 27B model, which scales queries by hidden size over heads."""
    vocabulary = gguf.byte_level()
    keys = {
        **gguf.LLAMA, "block_count": num_layers, "attention.key_length": 32, "attention.sliding_window": 512,
        "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
    }  # fmt: skip
    tensors = gguf.llama_tensors(len(vocabulary.tokens), tied=True)
    file = GgufFile(gguf.write_gguf(tmp_path / "m.gguf", "gemma3", keys, tensors, vocabulary))
    config = model_config(file)
    spec = ModelSpec.from_hf(config)
    assert spec.attention_scale == scalar**-0.5
    assert spec.sliding_windows[:6] == (512,) * 5 + (None,)
    assert (spec.rope.rope_type, spec.rope.theta, spec.rope.factor) == ("linear", 1e6, 8.0)
    assert (spec.window_rope.rope_type, spec.window_rope.theta) == ("default", 1e4)
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert "hidden_act" not in config
