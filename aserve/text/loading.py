"""Loads transformers' tokenizer of a model folder: the one place that imports transformers' tokenisation.

The class is chosen as AutoTokenizer chooses it, for the families that are served, but without importing AutoTokenizer:
that brings torch and modelling code along (2.2 s instead of 0.8 s). Never reaches for a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from aserve.core.errors import ModelLoadError
from aserve.text.settings import read_json

_OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""What a folder may hold in place of tokenizer.json; transformers converts them, with packages that are not ours."""

_FAMILY_CLASSES: Mapping[str, str] = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
}
"""transformers' tokenizer class by model type, where it is not the plain backend."""

_OVERRULED = frozenset({"qwen2"})
"""Model types whose checkpoints often name a wrong class; the family's own is taken."""

_CLASSES = frozenset({"LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "GPT2Tokenizer", "CodeLlamaTokenizer"})
"""Classes that build their tokenizer themselves; all others read tokenizer.json as it is."""


def load_backend(folder: Path) -> Any:
    """Return a ``TokenizersBackend`` for a folder. Raises ModelLoadError."""
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(_no_tokenizer(folder))
    config = read_json(folder / "config.json")
    settings = read_json(folder / "tokenizer_config.json")
    serialised = read_json(folder / "tokenizer.json")
    name = _class_name(config, settings, _is_byte_level(serialised))
    try:
        import transformers

        return getattr(transformers, name).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise anything from KeyError to a bare Exception
        found = ", ".join(n for n in ("tokenizer.json", "tokenizer_config.json") if (folder / n).is_file())
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"the tokenizer in {folder} ({found}) cannot be loaded: {reason[:500]}") from error


def _no_tokenizer(folder: Path) -> str:
    others = [name for name in _OTHER_FORMS if (folder / name).is_file()]
    if not others:
        return f"{folder} holds no tokenizer: looked for tokenizer.json"
    place = repr(str(folder))
    return (
        f"{folder} holds {others[0]} but no tokenizer.json, which is needed; make it with transformers, sentencepiece "
        f"and protobuf: AutoTokenizer.from_pretrained({place}).save_pretrained({place})"
    )


def _class_name(config: dict[str, Any], settings: dict[str, Any], byte_level: bool) -> str:
    """Follow AutoTokenizer.from_pretrained of transformers 5."""
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = declared.removesuffix("Fast") if isinstance(declared, str) else None
    family = config.get("model_type")
    registered = _FAMILY_CLASSES.get(family) if isinstance(family, str) else None
    if name == "LlamaTokenizer" and byte_level and family not in _OVERRULED:
        return "TokenizersBackend"  # LlamaTokenizer is always sentencepiece-like
    if registered is not None and (name is None or family in _OVERRULED):
        return registered
    return name if name in _CLASSES else "TokenizersBackend"


def _is_byte_level(serialised: dict[str, Any]) -> bool:
    def kinds(part: Any) -> list[Any]:
        if not isinstance(part, dict):
            return []
        fields = cast(dict[str, Any], part)
        inner: list[Any] = [*fields.get("pretokenizers", []), *fields.get("decoders", [])]
        return [fields.get("type"), *(k for step in inner for k in kinds(step))]

    return "ByteLevel" in kinds(serialised.get("pre_tokenizer")) + kinds(serialised.get("decoder"))
