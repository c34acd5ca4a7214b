"""Tiny GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from aserve.text.token_bytes import byte_alphabet

CONTROL, USER_DEFINED, BYTE, NORMAL, UNKNOWN = 3, 4, 6, 1, 2
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass
class Vocabulary:
    """Metadata under ``tokenizer.ggml``."""

    model: str
    pre: str | None
    tokens: list[str]
    kinds: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    ids: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)


def byte_level(pre: str = "smollm") -> Vocabulary:
    letter = {b: c for c, b in byte_alphabet().items()}
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", *[letter[b] for b in range(256)]]
    merges = ["t h", "th e", "Ġ the", "1 2", "12 3", "h e"]
    tokens += [m.replace(" ", "") for m in merges]
    kinds = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 4)
    return Vocabulary(
        "gpt2",
        pre,
        tokens,
        kinds,
        merges,
        ids={"bos": 1, "eos": 2, "unknown": 0, "padding": 2},
        flags={"add_bos_token": False, "add_space_prefix": False},
    )


def sentencepiece(*, prefix: bool = True) -> Vocabulary:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{b:02X}>" for b in range(256)],
        "  " if not prefix else "▁▁",
        "▁",
        *"abcdehilnorst.",
        "th",
        "the",
        "▁the",
        "▁t",
    ]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    kinds += [NORMAL] * (len(tokens) - len(kinds))
    scores = [0.0] * 259 + [-float(n) for n in range(len(tokens) - 259)]
    return Vocabulary(
        "llama",
        "default",
        tokens,
        kinds,
        scores=scores,
        ids={"bos": 1, "eos": 2, "unknown": 0},
        flags={"add_space_prefix": prefix},
    )


def write_gguf(
    path: Path,
    architecture: str,
    numbers: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    vocabulary: Vocabulary,
    *,
    kinds: Mapping[str, str] | None = None,
    template: str | None = CHATML,
    extra: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write a file; ``numbers`` go under the architecture's name, ``kinds`` are the tensors' quantisations."""
    writer = GGUFWriter(path, architecture)
    for key, value in numbers.items():
        name = f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    for name, token_id in vocabulary.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    for name, flag in vocabulary.flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    if template is not None:
        writer.add_chat_template(template)
    if extra is not None:
        extra(writer)
    for name, values in tensors.items():
        kind = GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        stored = values if kind.name == "F32" else quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=None if kind.name in ("F32", "F16") else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(values: np.ndarray) -> np.ndarray:
    """Float32 values that bfloat16 holds exactly."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


LLAMA = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 16,
}


def llama_tensors(vocab_size: int, *, tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of ``LLAMA`` under GGUF names, query and key rows in llama.cpp's order."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rounded(rng.normal(0, 0.1, shape))

    tensors = {"token_embd.weight": draw(vocab_size, 64), "output_norm.weight": 1 + draw(64)}
    if not tied:
        tensors["output.weight"] = draw(vocab_size, 64)
    for n in range(2):
        tensors |= {
            f"blk.{n}.attn_norm.weight": rounded(1 + draw(64)),
            f"blk.{n}.ffn_norm.weight": rounded(1 + draw(64)),
            f"blk.{n}.attn_q.weight": draw(64, 64),
            f"blk.{n}.attn_k.weight": draw(32, 64),
            f"blk.{n}.attn_v.weight": draw(32, 64),
            f"blk.{n}.attn_output.weight": draw(64, 64),
            f"blk.{n}.ffn_gate.weight": draw(96, 64),
            f"blk.{n}.ffn_up.weight": draw(96, 64),
            f"blk.{n}.ffn_down.weight": draw(64, 96),
        }
    tensors["output_norm.weight"] = rounded(tensors["output_norm.weight"])
    return tensors


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A small sound Llama file."""
    vocabulary = byte_level()
    return write_gguf(tmp_path / "tiny.gguf", "llama", LLAMA, llama_tensors(len(vocabulary.tokens)), vocabulary)


@pytest.fixture(scope="session")
def gguf() -> Any:
    """The functions and constants of this module."""
    return sys.modules[__name__]
