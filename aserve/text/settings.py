"""What a model folder's configuration files say about ending and sampling.

Reads config.json and generation_config.json as plain JSON. Called once, by the tokenizer's load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from aserve.core.errors import ModelLoadError

_TINY = 1e-9
_RANGES: Mapping[str, tuple[float, float]] = {
    "repetition_penalty": (_TINY, math.inf),
    "temperature": (0, math.inf),
    "top_p": (_TINY, 1),
    "top_k": (0, math.inf),
    "min_p": (0, 1),
}
"""Valid values of the sampling settings; the penalty and top_p must be above 0."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Facts about text from a model's configuration.

    Attributes:
        vocab_size: ids the model knows are ``[0, vocab_size)``; None if there is no config.json.
        stop_token_ids: end-of-text ids, unchecked.
        generation_defaults: sampling settings that the model's makers recommend.
    """

    vocab_size: int | None
    stop_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float | int]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, {} if there is no such file. Raises ModelLoadError."""
    if not path.is_file():
        return {}
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return cast(dict[str, Any], value)


def read_settings(folder: Path) -> TextSettings:
    """Read a model folder. Files may be absent. Raises ModelLoadError for a file that is no JSON object."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    text_config = cast(dict[str, Any], inner) if isinstance(inner, dict) else config
    generation = read_json(folder / "generation_config.json")
    size: Any = text_config.get("vocab_size", config.get("vocab_size"))
    stops = [i for source in (generation, config, text_config) for i in _ids(source.get("eos_token_id"))]
    return TextSettings(
        size if _is_int(size) and size > 0 else None, tuple(dict.fromkeys(stops)), _defaults(generation)
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(value: Any) -> Iterable[int]:
    values: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
    return [i for i in values if _is_int(i)]


def _defaults(generation: dict[str, Any]) -> dict[str, float | int]:
    """Sampling settings that are stated and valid.

    As in transformers, ``do_sample: false`` switches all but the repetition penalty off, and ``top_k: 0`` means no
    limit. transformers' own default of 50 for a ``top_k`` that is not stated is not taken over: only what the model's
    makers wrote counts.
    """
    names = ["repetition_penalty"] if generation.get("do_sample") is False else list(_RANGES)
    defaults: dict[str, float | int] = {}
    for name in names:
        value: Any = generation.get(name)
        low, high = _RANGES[name]
        number = _is_int(value) or (isinstance(value, float) and name != "top_k")
        if number and low <= value <= high and value != math.inf:
            defaults[name] = value
    return defaults
