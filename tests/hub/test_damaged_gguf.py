"""Damaged and unsupported GGUF files: one line that names the file, and nothing left in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aserve.core.errors import ModelLoadError
from aserve.hub import resolve


def refused(path: Path, message: str) -> None:
    cache = path.parent / "cache"
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve(str(path), cache_dir=cache)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert not any((cache / "models").glob("*"))
    assert not any((cache / "work").glob("*"))


@pytest.mark.parametrize("keep", [4, 10, 24, 100, 5000, 0.5, 0.9, -1])
def test_a_file_that_is_cut_off(tiny_gguf: Path, keep: float) -> None:
    data = tiny_gguf.read_bytes()
    size = int(len(data) * keep) if 0 < keep < 1 else int(keep)
    tiny_gguf.write_bytes(data[:size])
    refused(tiny_gguf, "damaged or cut off; download it again")


@pytest.mark.parametrize("place", [4, 8, 16])
def test_a_broken_header(tiny_gguf: Path, place: int) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    data[place : place + 4] = b"\xff\xff\xff\x7f"
    tiny_gguf.write_bytes(data)
    refused(tiny_gguf, "no GGUF file, or it is damaged")


def write(
    gguf: Any,
    path: Path,
    *,
    architecture: str = "llama",
    numbers: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    extra: Any = None,
) -> Path:
    vocabulary = gguf.byte_level()
    tensors = gguf.llama_tensors(len(vocabulary.tokens))
    for name in more:
        tensors[name] = tensors["output_norm.weight"]
    kept = {k: v for k, v in tensors.items() if k not in without}
    values = {k: v for k, v in {**gguf.LLAMA, **(numbers or {})}.items() if v is not None}
    return gguf.write_gguf(path / "m.gguf", architecture, values, kept, vocabulary, extra=extra)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "holds a mamba model; GGUF files of llama, qwen2, qwen3, gemma3 can be converted"),
        ({"numbers": {"expert_count": 8}}, "mixture of experts"),
        ({"numbers": {"attention.sliding_window": 32}}, "sliding windows of llama"),
        ({"numbers": {"block_count": None}}, "llama.block_count is missing"),
        ({"numbers": {"block_count": "two"}}, "llama.block_count has the wrong type"),
        ({"without": ("token_embd.weight",)}, "tensor token_embd.weight is missing"),
        ({"without": ("blk.1.attn_v.weight",)}, r"tensor blk\.1\.attn_v\.weight missing"),
        ({"numbers": {"block_count": 3}}, r"tensor blk\.2\.attn_norm\.weight and \d+ more missing"),
        ({"more": ("blk.0.strange.weight",)}, r"tensor blk\.0\.strange\.weight is not known"),
        ({"extra": lambda w: w.add_uint16("split.count", 3)}, "one of 3 parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_converted(gguf: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refused(write(gguf, tmp_path, **changes), message)


def test_a_full_disk(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aserve.hub.gguf_convert.write_safetensors", full)
    cache = tiny_gguf.parent / "cache"
    with pytest.raises(ModelLoadError, match=f"no space is left on the disk of {cache}"):
        resolve(str(tiny_gguf), cache_dir=cache)
    assert not any((cache / "models").iterdir())
    assert not any((cache / "work").iterdir())


def test_a_cache_folder_that_cannot_be_made(tiny_gguf: Path) -> None:
    blocked = tiny_gguf.parent / "file"
    blocked.write_text("")
    with pytest.raises(ModelLoadError, match="cannot be written"):
        resolve(str(tiny_gguf), cache_dir=blocked / "cache")
    shutil.rmtree(tiny_gguf.parent / "cache", ignore_errors=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "numbers": {"attention.head_count_kv": None},
                "extra": lambda w: w.add_array("llama.attention.head_count_kv", [1, 2]),
            },
            "differs between layers",
        ),
        ({"numbers": {"rope.freq_base": "fast"}}, r"llama\.rope\.freq_base has the wrong type"),
        ({"numbers": {"attention.layer_norm_rms_epsilon": None}}, r"layer_norm_rms_epsilon is missing"),
        ({"extra": lambda w: w.add_uint32("llama.rope.scaling.type", 3)}, r"scaling\.type has the wrong type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata_of_the_wrong_shape(gguf: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refused(write(gguf, tmp_path, **changes), message)


def test_equal_numbers_for_every_layer(gguf: Any, tmp_path: Path) -> None:
    path = write(
        gguf,
        tmp_path,
        numbers={"attention.head_count_kv": None},
        extra=lambda w: w.add_array("llama.attention.head_count_kv", [2, 2]),
    )
    assert resolve(str(path), cache_dir=tmp_path / "cache").is_dir()


def test_a_vocabulary_that_is_no_list(gguf: Any, tmp_path: Path) -> None:
    vocabulary = gguf.byte_level()
    for key, value, message in (("tokens", [], "tokens is missing"), ("model", None, "model is missing")):
        other = gguf.byte_level()
        setattr(other, key, value)
        path = tmp_path / f"{key}.gguf"
        tensors = gguf.llama_tensors(len(vocabulary.tokens))
        if value is None:
            other.model = "gpt2"
            gguf.write_gguf(path, "llama", gguf.LLAMA, tensors, other)
            path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.modal"))
        else:
            other.kinds = []
            gguf.write_gguf(path, "llama", gguf.LLAMA, tensors, other)
        refused(path, message)


def test_whole_numbers_are_no_weights(gguf: Any, tmp_path: Path) -> None:
    numbers = np.zeros((32, 64), np.int32)
    path = write(
        gguf, tmp_path, without=("blk.0.attn_k.weight",), extra=lambda w: w.add_tensor("blk.0.attn_k.weight", numbers)
    )
    refused(path, r"tensor blk\.0\.attn_k\.weight is stored as I32, which cannot be converted")
