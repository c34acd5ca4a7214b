"""Bytes of weights by format, and what a config may say about the format."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.core.errors import ConfigError, ModelLoadError
from aserve.core.model_spec import ModelSpec
from aserve.planning.parity import ATTENTION_SLOWDOWN, parity_context
from aserve.planning.quantization import read_weight_format
from aserve.planning.weights import num_parameters, weight_bytes
from aserve.simulate.cost import PRESETS

GIB = 2**30


def quantized(**settings: Any) -> Any:
    return read_weight_format({"quantization_config": settings})


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_plain_weights(config: dict[str, Any]) -> None:
    assert read_weight_format(config) is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 256 rows of 512 columns: weights, scales of 16 bits, zero points
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 65536 + 1024 * 2 + 1024 // 2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, 65536 + 1024 * 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 65536 + 1024 * 2 + 1024 // 2 + 512 * 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 131072 + 256 * 2 + 256 + 512 * 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 131072 + 2 * 4 * 4),
        ({"quant_method": "fp8"}, 131072 + 256 * 4),
        ({"quant_method": "mxfp4"}, 65536 + 256 * 16),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 128}}
                },
                "ignore": ["lm_head"],
            },
            65536 + 1024 * 2,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "symmetric": True, "strategy": "channel"}}},
            },
            131072 + 256 * 2,
        ),
    ],
)
def test_bytes_of_a_matrix(settings: dict[str, Any], expected: int) -> None:
    assert quantized(**settings).num_bytes(256, 512) == expected


@pytest.mark.parametrize(
    ("settings", "left_alone"),
    [
        ({"quant_method": "awq"}, {"lm_head"}),
        ({"quant_method": "gptq", "lm_head": True}, set()),
        ({"quant_method": "awq", "modules_to_not_convert": ["down_proj"]}, {"lm_head", "model.layers.1.mlp.down_proj"}),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.1"]}, {"lm_head", "model.layers.1.mlp.down_proj"}),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.11"]}, {"lm_head"}),
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": [r"re:.*down_proj"],
                "config_groups": {"g": {"weights": {}}},
            },
            {"model.layers.1.mlp.down_proj"},
        ),
    ],
)
def test_layers_that_are_left_alone(settings: dict[str, Any], left_alone: set[str]) -> None:
    names = {"lm_head", "model.layers.1.mlp.down_proj", "model.layers.2.self_attn.q_proj"}
    assert {name for name in names if not quantized(**settings).covers(name)} == left_alone


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("awq", "quantization_config must be an object"),
        ({"quant_method": "magic"}, "'magic', whose sizes are not known; known: awq, gptq, fp8"),
        ({"bits": 4}, "None, whose sizes are not known"),
        ({"quant_method": "awq", "bits": 0}, "quantization_config.bits must be a positive whole number, not 0"),
        ({"quant_method": "awq", "group_size": "large"}, "quantization_config.group_size must be a positive"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two sizes"),
        ({"quant_method": "awq", "modules_to_not_convert": "lm_head"}, "must be a list of layer names"),
        ({"quant_method": "compressed-tensors"}, "must describe one kind of weights, not 0"),
    ],
)
def test_formats_that_make_no_sense(found: Any, message: str) -> None:
    with pytest.raises(
        ModelLoadError, match=r"quantiz|weight_block_size|config_groups|modules_to_not_convert"
    ) as caught:
        read_weight_format({"quantization_config": found})
    assert message in caught.value.message


def test_a_pattern_that_is_no_expression() -> None:
    with pytest.raises(ModelLoadError, match="is no regular expression"):
        quantized(quant_method="awq", modules_to_not_convert=["re:("]).covers("x")


def test_a_32b_model_in_4_bits(configs: dict[str, Any], specs: dict[str, ModelSpec]) -> None:
    """The published checkpoint of DeepSeek-R1-Distill-Qwen-32B-AWQ has files of 19.3 GB."""
    spec, weights = specs["qwen2-32b-awq"], read_weight_format(configs["qwen2-32b-awq"])
    assert num_parameters(spec) == 32_763_876_352
    sizes = weight_bytes(spec, dtype_bytes=2, max_model_len=8192, weights=weights)
    assert sizes.total - sizes.tables == pytest.approx(19.33e9, rel=0.002)
    assert sizes.plain == pytest.approx(2 * 152064 * 5120 * 2, rel=0.002)  # both ends, norms and biases
    plain = weight_bytes(spec, dtype_bytes=2, max_model_len=8192)
    assert plain.quantized == 0
    assert plain.plain == 2 * num_parameters(spec)


def test_ranks_share_what_can_be_cut(specs: dict[str, ModelSpec]) -> None:
    spec = specs["qwen2-7b"]
    one, two = (weight_bytes(spec, dtype_bytes=2, max_model_len=100, ranks=n) for n in (1, 2))
    assert two.plain == pytest.approx(one.plain / 2, rel=1e-3)  # norms and two biases are held by both
    assert two.plain > one.plain / 2
    assert two.tables == one.tables
    # each KV head is held by two of eight ranks
    more = weight_bytes(specs["qwen2-32b-awq"], dtype_bytes=2, max_model_len=100, ranks=8)
    assert more.plain == pytest.approx(2 * 32.76e9 / 8, rel=2e-3)


@pytest.mark.parametrize(("ranks", "what"), [(3, "28 query heads"), (7, "152192 rows"), (16, "28 query heads")])
def test_ranks_that_do_not_divide(specs: dict[str, ModelSpec], ranks: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"--tp {ranks} does not divide the model's {what}"):
        weight_bytes(specs["qwen2-7b"], dtype_bytes=2, max_model_len=100, ranks=ranks)


@pytest.mark.parametrize(("name", "num_weights"), [("qwen2-7b", 6.525e9), ("gemma2-2b", 2.024e9)])
def test_attention_costs_as_much_as_the_weights_at_parity(
    specs: dict[str, ModelSpec], name: str, num_weights: float
) -> None:
    """Operations of a token: 2 per weight of a layer; per token of context 4 * head_dim in each head of each layer."""
    spec = specs[name]
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * parity_context(spec) * ATTENTION_SLOWDOWN
    assert attention == pytest.approx(2 * num_weights, rel=1e-3)


def test_the_simulated_machine_plans_as_a_server_of_its_model_does(specs: dict[str, ModelSpec]) -> None:
    assert parity_context(specs["qwen2-7b"]) == PRESETS["h200"].parity_context
