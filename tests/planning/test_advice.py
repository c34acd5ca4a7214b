"""Every change that a message names makes the same computation succeed, and nothing nearer would have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aserve.core.config import CacheConfig
from aserve.core.errors import ConfigError
from aserve.core.memory import MemoryUse
from aserve.core.model_spec import ModelSpec
from aserve.planning.advice import fits, limit_warning, sized_capacity, smallest_gpu
from aserve.planning.kv_size import Sizing, TooLittleMemoryError, count_blocks, with_cache
from aserve.planning.limits import Limits

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = ("kv_cache_memory", "kv_cache_tokens", "gpu_memory_fraction")
LIMITS = ("max_batch_tokens", "max_num_seqs", "max_model_len")
Make = Callable[..., Sizing]


def with_flag(sizing: Sizing, flag: str, value: str) -> Sizing:
    """What a user would start after changing one flag."""
    name = flag.removeprefix("--").replace("-", "_")
    if name in LIMITS:
        return replace(sizing, limits=replace(sizing.limits, **{name: int(value)}))
    if name == "dtype":
        assert value == "bfloat16"
        assert sizing.in_half is not None
        return sizing.in_half
    kinds = {"kv_cache_memory": str, "kv_cache_tokens": int, "gpu_memory_fraction": float}
    return with_cache(sizing, **{name: kinds[name](value)})


def advised(sizing: Sizing) -> tuple[str, Sizing | None]:
    """The message, and what its advice leads to; None when it says that no flag helps."""
    with pytest.raises(TooLittleMemoryError) as caught:
        sized_capacity(sizing)
    message = caught.value.message
    match = re.search(r"; set (--[a-z-]+) (\S+)$", message)
    if match is None:
        assert "; no single flag changes that: " in message
        return message, None
    return message, with_flag(sizing, *match.groups())


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        pytest.param({"gpu_memory_fraction": 0.15}, "set --gpu-memory-fraction 0.18", id="fraction too low"),
        pytest.param({"weights": 92 * GIB}, "set --gpu-memory-fraction 0.94", id="weights too large for the default"),
        pytest.param(
            {"weights": 200 * GIB},
            "no single flag changes that: use a smaller or a quantized model, or a larger GPU (these settings take one "
            "of 225 GiB)",
            id="weights too large",
        ),
        pytest.param(
            {"limits": {"max_batch_tokens": 2**21}},
            "set --max-batch-tokens 1191680",
            id="batch tokens too many",
        ),
        pytest.param(
            {"limits": {"max_num_seqs": 100_000, "max_batch_tokens": 16}},
            "set --max-num-seqs 74735",
            id="too many rows",
        ),
        pytest.param({"kv_cache_memory": "90GiB"}, "set --kv-cache-memory 84224MiB", id="memory too large"),
        pytest.param({"kv_cache_memory": "10KiB"}, "set --kv-cache-memory 1024KiB", id="memory too small for a block"),
        pytest.param({"kv_cache_tokens": 10**7}, "set --kv-cache-tokens 1347584", id="tokens too many"),
        pytest.param(
            {"others": 90 * GIB, "total": 100 * GIB},
            "no single flag changes that: free what other programs hold",
            id="other programs",
        ),
        pytest.param(
            {"others": 80 * GIB, "on_gpu": False, "total": 90 * GIB},
            "no single flag changes that: free memory, or use a smaller model",
            id="no room on the host",
        ),
    ],
)
def test_the_smallest_change(make_sizing: Make, settings: dict[str, Any], advice: str) -> None:
    message, changed = advised(make_sizing(**settings))
    assert message.endswith("; " + advice)
    if changed is not None:
        assert sized_capacity(changed).num_blocks >= 1


@pytest.mark.parametrize(
    ("flag", "nearer"),
    [
        ({"gpu_memory_fraction": 0.15}, {"gpu_memory_fraction": 0.17}),
        ({"kv_cache_memory": "90GiB"}, {"kv_cache_memory": "84225MiB"}),
        ({"kv_cache_memory": "10KiB"}, {"kv_cache_memory": "1023KiB"}),
        ({"kv_cache_tokens": 10**7}, {"kv_cache_tokens": 1347585}),
    ],
)
def test_nothing_nearer_works(make_sizing: Make, flag: dict[str, Any], nearer: dict[str, Any]) -> None:
    assert not fits(make_sizing(**flag))
    assert not fits(make_sizing(**nearer))


def test_float32_weights_are_halved(make_sizing: Make) -> None:
    half = make_sizing(weights=60 * GIB)
    _, changed = advised(replace(make_sizing(weights=120 * GIB), in_half=half))
    assert changed is half


def test_the_size_of_a_larger_gpu_works(make_sizing: Make) -> None:
    sizing = make_sizing(weights=200 * GIB)
    least = smallest_gpu(sizing)
    assert least == 225 * GIB
    assert fits(make_sizing(weights=200 * GIB, total=least))
    assert not fits(make_sizing(weights=200 * GIB, total=least - GIB))


@st.composite
def sizings(draw: Any) -> Sizing:
    """Any device with any settings, those that fit included."""
    total = draw(st.integers(1, 200)) * draw(st.sampled_from([MIB, 100 * MIB, GIB]))
    weights, others = draw(st.integers(0, total)), draw(st.integers(0, total // 2))
    on_gpu = draw(st.booleans())
    by_token, by_row = draw(st.integers(0, MIB)), draw(st.integers(0, 4 * MIB))
    name = draw(st.sampled_from([*SIZES, None] if on_gpu else [*SIZES[:2], None]))
    values: dict[str, Any] = {
        "kv_cache_memory": st.integers(KIB, 2 * total).map(str),
        "kv_cache_tokens": st.integers(1, 2**22),
        "gpu_memory_fraction": st.floats(0.01, 1.0),
    }
    cache = {} if name is None else {name: draw(values[name])}
    windows = draw(st.sampled_from([(None,) * 4, (100,) * 4, (None, 100, 100, 100), (None, 40, None, 40)]))

    def memory_of(limits: Limits) -> MemoryUse:
        step = limits.max_batch_tokens * by_token + limits.max_num_seqs * by_row
        return MemoryUse(device="", on_gpu=on_gpu, total=total, others=others, weights=weights, activations=step)

    return Sizing(
        cache=CacheConfig(block_size=draw(st.sampled_from([1, 16, 48])), **cache),
        limits=Limits(
            max_num_seqs=draw(st.integers(1, 300)), max_batch_tokens=draw(st.integers(1, 20_000)), max_in_flight=1,
            max_model_len=draw(st.integers(1, 200_000)),
        ),
        spec=replace(SPEC, sliding_windows=windows),
        token_bytes=draw(st.integers(1, 2**18)),
        memory_of=memory_of,
    )  # fmt: skip


SPEC = ModelSpec.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 200_000,
    }
)


@settings(max_examples=300, deadline=None)
@given(sizings())
def test_any_advice_works(sizing: Sizing) -> None:
    if fits(sizing):
        capacity = sized_capacity(sizing)
        assert sizing.memory_with(capacity).unused >= 0
        assert capacity.max_length >= 1
        return
    _, changed = advised(sizing)
    if changed is not None:
        assert sized_capacity(changed).num_blocks >= 1
        return
    farthest = {"--max-batch-tokens": 16, "--max-num-seqs": 1, "--max-model-len": 64}  # what is advised at most
    if sizing.memory_of(sizing.limits).on_gpu and not (sizing.cache.kv_cache_memory or sizing.cache.kv_cache_tokens):
        farthest["--gpu-memory-fraction"] = 0.97
    for flag, value in farthest.items():
        now = getattr(sizing.limits, flag.removeprefix("--").replace("-", "_"), 0)
        if flag == "--gpu-memory-fraction" or now > value:
            assert not fits(with_flag(sizing, flag, str(value)))


@settings(max_examples=300, deadline=None)
@given(sizings())
def test_any_warning_works(sizing: Sizing) -> None:
    assume(fits(sizing))
    capacity = sized_capacity(sizing)
    warning = limit_warning(sizing, capacity)
    if capacity.max_length == sizing.limits.max_model_len:
        assert warning is None
        return
    assert warning is not None
    assert f"a request is limited to {capacity.max_length} tokens" in warning
    match = re.search(r"; set (--[a-z-]+) (\S+) for (\d+), or set --max-model-len (\d+) ", warning)
    if match is not None:
        changed = with_flag(sizing, *match.groups()[:2])
        assert sized_capacity(changed).max_length == sizing.limits.max_model_len
    match = re.search(r"set --max-model-len (\d+) to make", warning)
    assert match is not None
    own = with_flag(sizing, "--max-model-len", match[1])
    if fits(own):  # a host's default size follows the context
        assert limit_warning(own, sized_capacity(own)) is None


def test_more_context(make_sizing: Make) -> None:
    sizing = make_sizing(kv_cache_tokens=4000)
    warning = limit_warning(sizing, sized_capacity(sizing))
    assert warning == (
        "the KV cache holds 4000 tokens, so a request is limited to 4000 tokens, prompt and answer together, of a "
        "context of 16000; set --kv-cache-tokens 16000 for 16000, or set --max-model-len 4000 to make this limit your "
        "own"
    )
    sizing = make_sizing(gpu_memory_fraction=0.18)
    assert count_blocks(sizing) == 256
    assert "set --gpu-memory-fraction 0.19 for 16000" in (limit_warning(sizing, sized_capacity(sizing)) or "")


def test_a_refusal_that_no_size_caused_has_no_advice(make_sizing: Make) -> None:
    with pytest.raises(ConfigError, match="needs a GPU; on the CPU use"):
        sized_capacity(make_sizing(on_gpu=False, gpu_memory_fraction=0.5))
