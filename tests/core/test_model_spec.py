"""config.json of the supported families: what it means, and which words refuse it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aserve.core.errors import ModelLoadError
from aserve.core.model_spec import ModelSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "num_hidden_layers": 4}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
GEMMA2 = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 5,
}  # fmt: skip
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 7,
    "rope_theta": 1e6,
}  # fmt: skip
GEMMA3_4B = {  # as published: the rest are transformers' defaults
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip
ALL = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}


def spec(config: dict[str, Any], *without: str, **changes: Any) -> ModelSpec:
    return ModelSpec.from_hf({name: value for name, value in (config | changes).items() if name not in without})


def test_smollm2() -> None:
    got = spec(LLAMA)
    assert (got.num_layers, got.num_heads, got.num_kv_heads, got.head_dim) == (30, 9, 3, 64)
    assert (got.vocab_size, got.hidden_size, got.intermediate_size) == (49152, 576, 1536)
    assert (got.max_positions, got.norm_eps, got.dtype, got.eos_token_ids) == (8192, 1e-5, "bfloat16", (2,))
    assert (got.rope.rope_type, got.rope.theta, got.rope.rotary_dim) == ("default", 100000.0, 64)
    assert got.tie_word_embeddings
    assert got.sliding_windows == (None,) * 30


@pytest.mark.parametrize(("config", "want"), [(LLAMA, 9), (MISTRAL, 8), (QWEN2, 32), (QWEN3, 32)])
def test_kv_heads_that_are_absent_are_transformers_default(config: dict[str, Any], want: int) -> None:
    heads = 9 if config is LLAMA else 32
    got = spec(config, "num_key_value_heads", num_attention_heads=heads, hidden_size=64 * heads)
    assert got.num_kv_heads == want
    assert spec(config, num_key_value_heads=None).num_kv_heads == 9


def test_head_dim() -> None:
    assert spec(LLAMA, head_dim=32).head_dim == 32
    assert spec(LLAMA, head_dim=None).head_dim == 64
    assert spec(QWEN3, "head_dim").head_dim == 128
    assert spec(QWEN2, "head_dim").head_dim == 64


@pytest.mark.parametrize("config", ALL.values(), ids=list(ALL))
def test_tying_is_off_unless_it_is_set(config: dict[str, Any]) -> None:
    assert not spec(config, "tie_word_embeddings").tie_word_embeddings
    assert not spec(config, tie_word_embeddings=False).tie_word_embeddings


@pytest.mark.parametrize(
    ("config", "changes", "want"),
    [
        (LLAMA, {}, (False, False, False)),
        (LLAMA, {"attention_bias": True}, (True, True, False)),
        (LLAMA, {"mlp_bias": True}, (False, False, True)),
        (MISTRAL, {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
        (QWEN2, {"attention_bias": False}, (True, False, False)),
        (QWEN3, {}, (False, False, False)),
        (QWEN3, {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases(config: dict[str, Any], changes: dict[str, Any], want: tuple[bool, bool, bool]) -> None:
    got = spec(config, **changes)
    assert (got.qkv_bias, got.output_bias, got.mlp_bias) == want


@pytest.mark.parametrize(
    ("config", "changes", "want"),
    [
        (MISTRAL, {}, [4096] * 30),
        (MISTRAL, {"sliding_window": None}, [None] * 30),
        (QWEN2, {}, [None] * 4),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 64]),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 0}, [64] * 4),
        (QWEN2, {"use_sliding_window": True, "sliding_window": None}, [None] * 4),
        (
            QWEN2,
            {
                "use_sliding_window": True,
                "max_window_layers": 4,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [None, 64, None, 64],
        ),
        (LLAMA, {"sliding_window": 5}, [None] * 30),
    ],
)
def test_sliding_windows(config: dict[str, Any], changes: dict[str, Any], want: list[int | None]) -> None:
    assert list(spec(config, **changes).sliding_windows) == want


def test_mistral_has_a_window_unless_the_key_says_none() -> None:
    assert spec(MISTRAL, "sliding_window").sliding_windows == (4096,) * 30


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 9.0}, "rope_theta": 7.0},
        {"rope_scaling": {}, "rope_parameters": {"type": "linear", "factor": 2}, "rope_theta": 7},
    ],
)
def test_rope_settings_old_and_new(changes: dict[str, Any]) -> None:
    got = spec(LLAMA, **changes).rope
    assert (got.rope_type, got.theta, got.factor) == ("linear", 7.0, 2.0)


def test_rope_theta_defaults_to_ten_thousand() -> None:
    assert spec(LLAMA, "rope_theta").rope.theta == 10000.0


def test_yarn_extends_the_context_and_scales_the_attention() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    got = spec(LLAMA, rope_scaling=yarn)
    assert got.max_positions == 32768
    assert got.rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert spec(LLAMA, rope_scaling=yarn, max_position_embeddings=40960).max_positions == 40960
    assert spec(LLAMA, rope_scaling=yarn | {"attention_factor": 1.5}).rope.attention_factor == 1.5


@pytest.mark.parametrize(("value", "want"), [(None, ()), (5, (5,)), ([5, 7], (5, 7))])
def test_end_tokens(value: object, want: tuple[int, ...]) -> None:
    assert spec(LLAMA, eos_token_id=value).eos_token_ids == want


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({"dtype": "float32"}, "float32"), ({"torch_dtype": "torch.float16"}, "float16"), ({"torch_dtype": None}, None)],
)
def test_dtype(changes: dict[str, Any], dtype: str | None) -> None:
    assert spec(LLAMA, **changes).dtype == dtype


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@pytest.mark.parametrize("name", SIZES)
def test_a_missing_size_is_named(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} is missing"):
        spec(LLAMA, name)


@pytest.mark.parametrize("value", [0, -3, "12", 1.5, True, [4]])
@pytest.mark.parametrize("name", [*SIZES, "num_key_value_heads", "head_dim"])
def test_a_nonsensical_size_is_named(name: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} must be"):
        spec(LLAMA, **{name: value})


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; known: LlamaForCausalLM"),
        (LLAMA, {"architectures": []}, "architectures is missing"),
        (LLAMA, {"architectures": None}, "architectures is missing"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"num_key_value_heads": 4}, "not a multiple of num_key_value_heads 4"),
        (LLAMA, {"hidden_size": 577}, "hidden_size 577 is not a multiple"),
        (LLAMA, {"head_dim": 33}, "head_dim must be even"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps must be"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be"),
        (LLAMA, {"rope_theta": "big"}, "rope_theta must be"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be"),
        (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id must be"),
        (LLAMA, {"eos_token_id": [1, -1]}, "eos_token_id must be"),
        (LLAMA, {"rope_scaling": {"rope_type": "magic", "factor": 2}}, "rope type 'magic' is not supported"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, "short_factor must be a list of 32"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        (LLAMA, {"rope_scaling": 3}, "rope_scaling must be an object"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, r"rope_scaling\.low_freq_factor is missing"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor must be greater",
        ),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layer types"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        (QWEN2, {"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layer_types must be"),
        (QWEN2, {"layer_types": "full_attention_"}, "layer_types must be"),
        (QWEN2, {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "no sliding_window is in use"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers must be"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window must be"),
    ],
)
def test_other_nonsense_is_named(config: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as caught:
        spec(config, **changes)
    assert "\n" not in caught.value.message


def test_from_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelSpec.from_folder(tmp_path) == spec(LLAMA)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"null"])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"config\.json") as caught:
        ModelSpec.from_folder(tmp_path)
    assert "\n" not in caught.value.message


def test_gemma2() -> None:
    got = spec(GEMMA2, "num_key_value_heads", num_attention_heads=8, hidden_size=576)
    assert (got.num_kv_heads, got.head_dim, got.attention_scale) == (4, 256, 1 / 16)
    assert got.sliding_windows == (4096, None, 4096, None, 4096)
    assert (got.attention_softcap, got.logit_softcap, got.activation) == (50.0, 30.0, "gelu_tanh")
    assert (got.norm_unit_offset, got.embedding_scale, got.tie_word_embeddings) == (True, 24.0, True)
    assert got.window_rope == got.rope
    got = spec(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=144)
    assert (got.attention_softcap, got.logit_softcap, got.attention_scale) == (None, None, 1 / 12)


def test_gemma3() -> None:
    got = spec(GEMMA3, sliding_window=512)
    assert got.sliding_windows == (512,) * 5 + (None, 512)
    assert (got.rope.theta, got.window_rope.theta, got.qk_norm) == (1e6, 1e4, "head")
    assert (got.attention_softcap, got.logit_softcap) == (None, None)
    assert spec(GEMMA3, sliding_window=512, sliding_window_pattern=3).sliding_windows[:4] == (512, 512, None, 512)
    types = ["full_attention"] + ["sliding_attention"] * 6
    assert spec(GEMMA3, sliding_window=8, layer_types=types).sliding_windows == (None,) + (8,) * 6
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 6.0},
    }
    got = spec(GEMMA3, "rope_scaling", "rope_theta", rope_parameters=ropes)
    assert (got.rope.rope_type, got.rope.factor, got.rope.theta) == ("linear", 8.0, 5.0)
    assert (got.window_rope.rope_type, got.window_rope.theta) == ("default", 6.0)
    got = spec(GEMMA3, rope_theta=5.0, rope_local_base_freq=6.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert (got.rope.factor, got.rope.theta, got.window_rope.factor, got.window_rope.theta) == (2.0, 5.0, 1.0, 6.0)


def test_gemma3_4b_as_published() -> None:
    got = spec(GEMMA3_4B)
    assert (got.num_heads, got.num_kv_heads, got.head_dim, got.vocab_size) == (8, 4, 256, 262208)
    assert (got.max_positions, got.dtype, got.eos_token_ids, got.tie_word_embeddings) == (
        131072, "bfloat16", (1, 106), True,
    )  # fmt: skip
    assert (got.rope.rope_type, got.rope.factor, got.rope.theta) == ("linear", 8.0, 1e6)
    assert got.sliding_windows[4:7] == (1024, None, 1024)
    assert sum(window is None for window in got.sliding_windows) == 5


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported in Gemma3ForCausalLM"),
        (GEMMA2, {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported, only gelu_pytorch_tanh"),
        (GEMMA2, {"sliding_window": None}, "sliding_window must be a positive whole number"),
        (GEMMA2, {"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive whole number"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 3.0}}, "rope_parameters.rope_theta must be absent"),
        (GEMMA3_4B, {"text_config": {}}, "hidden_size is missing"),
        (GEMMA3_4B, {"text_config": {"hidden_size": "x"}}, "text_config.hidden_size must be a positive whole number"),
    ],
)
def test_gemma_refusals(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec(config, **changes)


PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 9}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 32,
}  # fmt: skip


def test_phi3_longrope_old_and_new() -> None:
    factors = {"short_factor": [1] * 32, "long_factor": [2.0] * 32}
    for kind in ("longrope", "su", "yarn"):
        got = spec(PHI3, max_position_embeddings=131072, rope_scaling={"type": kind, **factors})
        assert (got.rope.rope_type, got.rope.original_max_positions, got.max_positions) == ("longrope", 4096, 131072)
        assert got.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    got = spec(
        PHI3, partial_rotary_factor=0.75, rope_scaling={"type": "su", "short_factor": [1] * 24, "long_factor": [1] * 24}
    )
    assert got.rope.rotary_dim == 48


def test_layers_with_experts() -> None:
    got = spec(QWEN3_MOE, mlp_only_layers=[1], decoder_sparse_step=2).experts
    assert got is not None
    assert (got.num_experts, got.num_active, got.by_layer) == (8, 8, (False, False, False, True))
    assert spec(QWEN3_MOE, num_experts_per_tok=3, use_sliding_window=True, sliding_window=7).sliding_windows == (7,) * 4
    assert spec(LLAMA).experts is None


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layer numbers"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts must be a positive whole number"),
        (PHI3, {"rope_scaling": {"type": "su", "short_factor": [1] * 32, "long_factor": "x"}}, "long_factor must be a"),
        (PHI3, {"rope_scaling": {"type": "su", "short_factor": [0] * 32}}, "short_factor must be a list of 32"),
        (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of 64 channels"),
        (PHI3, {"partial_rotary_factor": 0.05}, "partial_rotary_factor 0.05 of 64 channels"),
    ],
)  # fmt: skip
def test_refusals_of_newer_families(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec(config, **changes)
