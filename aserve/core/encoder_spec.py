"""The sizes of an encoder (BERT, Devlin et al. 2019), read from a Hugging Face ``config.json``.

What ``ModelSpec`` is for decoders. Defaults for absent keys are those of transformers 5. Standard library only; called
by the loader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from aserve.core.config_reader import ConfigReader
from aserve.core.errors import ModelLoadError

EncoderActivation = Literal["gelu", "gelu_tanh", "relu"]

_ACTIVATIONS: Mapping[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_SCORES: Mapping[str, bool] = {"Sigmoid": True, "Identity": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """What an encoder is, independent of device and dtype.

    Attributes:
        max_positions: longest input.
        num_types: kinds of tokens that are told apart: those of the first text of a pair, and those of the second.
        num_labels: rows of the classification head; 0 where there is none.
        score_is_sigmoid: whether a score is the logistic function of the head's output, or that itself.
        dtype: name of the checkpoint's dtype, None when the config does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    num_types: int
    norm_eps: float
    activation: EncoderActivation
    num_labels: int
    score_is_sigmoid: bool
    dtype: str | None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_weights(self) -> int:
        """Parameters, the classification head included."""
        hidden, inner = self.hidden_size, self.intermediate_size
        layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
        head = (hidden * (hidden + 1) + self.num_labels * (hidden + 1)) if self.num_labels else 0
        tables = (self.vocab_size + self.max_positions + self.num_types + 2) * hidden
        return tables + self.num_layers * layer + head

    @classmethod
    def from_folder(cls, folder: Path) -> EncoderSpec:
        """Read ``config.json`` of a model folder. Raises ModelLoadError if it is absent, damaged or unsupported."""
        try:
            config: object = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"config.json in {folder} cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise ModelLoadError(f"config.json in {folder} is not a JSON object")
        return cls.from_hf(cast("dict[str, Any]", config))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> EncoderSpec:
        """Read a parsed ``config.json`` whose architecture is one of ``core.abilities.ENCODERS``."""
        reader = ConfigReader(config)
        architecture: str = config["architectures"][0]
        hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
        if hidden_size % num_heads:
            raise ModelLoadError(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
            )
        if reader.text("position_embedding_type", "absolute") != "absolute":
            raise ModelLoadError("config.json: position_embedding_type must be absolute")
        if reader.boolean("is_decoder", False):
            raise ModelLoadError("config.json: is_decoder is not supported for BERT")
        activation = reader.text("hidden_act", "gelu")
        if activation not in _ACTIVATIONS:
            raise ModelLoadError(f"config.json: hidden_act {activation!r} is not supported for BERT")
        dtype = next((config[name] for name in ("dtype", "torch_dtype") if reader.has(name)), None)
        return cls(
            architecture=architecture,
            vocab_size=reader.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=reader.integer("num_hidden_layers"),
            num_heads=num_heads,
            max_positions=reader.integer("max_position_embeddings"),
            num_types=reader.integer("type_vocab_size", 2),
            norm_eps=reader.number("layer_norm_eps", 1e-12),
            activation=_ACTIVATIONS[activation],
            num_labels=1 if architecture.endswith("ForSequenceClassification") else 0,
            score_is_sigmoid=_score_is_sigmoid(reader),
            dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,
        )


def _score_is_sigmoid(reader: ConfigReader) -> bool:
    """As sentence-transformers' CrossEncoder: the sigmoid of a single label, unless the config names a function."""
    own = reader.child("sentence_transformers") or reader.empty("sentence_transformers")
    name = own.text("activation_fn", reader.text("sbert_ce_default_activation_function", "Sigmoid")).rpartition(".")[2]
    if name not in _SCORES:
        raise ModelLoadError(f"config.json: the scores' activation {name} is not supported, only Sigmoid and Identity")
    return _SCORES[name]
