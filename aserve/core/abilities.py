"""What a model folder says its model is for: answers, vectors or scores, and how its vectors are made.

``config.json`` names the architecture; the files that sentence-transformers writes (``modules.json``, the pooling
module's ``config.json``, ``sentence_bert_config.json``, ``config_sentence_transformers.json``) say the rest, and
whatever of them is not computed here is refused rather than left out. Standard library only; called when a model is
opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from aserve.core.errors import ModelLoadError
from aserve.core.pooling import Abilities, PoolingKind

ENCODERS = frozenset({"BertModel", "BertForMaskedLM", "BertForSequenceClassification"})
"""Architectures whose tokens all see each other; ``core.encoder_spec`` reads their sizes."""

_CLASSIFIER = "ForSequenceClassification"
_MODES: Mapping[str, PoolingKind] = {
    "cls": PoolingKind.FIRST,
    "cls_token": PoolingKind.FIRST,
    "mean": PoolingKind.MEAN,
    "mean_tokens": PoolingKind.MEAN,
    "lasttoken": PoolingKind.LAST,
    "last_token": PoolingKind.LAST,
}
"""As sentence-transformers calls them, in the keys ``pooling_mode_NAME`` or as the value of ``pooling_mode``."""


class FolderAbilities(NamedTuple):
    """What a folder says: the abilities, and the longest input the model's makers use it with (None: any)."""

    abilities: Abilities
    max_length: int | None


def read_abilities(folder: Path) -> FolderAbilities:
    """Read a model folder. Raises ModelLoadError for a damaged file, or a way of pooling that is not supported."""
    config = _read(folder, "config.json")
    architecture = _architecture(config)
    is_encoder = architecture in ENCODERS
    inner = config.get("text_config")
    size = (cast("dict[str, Any]", inner) if isinstance(inner, dict) else config).get("hidden_size")
    if architecture.endswith(_CLASSIFIER):
        _check_one_label(config)
        return FolderAbilities(
            Abilities(tasks=("score",), kind=PoolingKind.CLASSES, normalize=False, size=1, is_cross_encoder=True), None
        )
    modules = _modules(folder)
    settings = _read(folder, "config_sentence_transformers.json")
    kind, normalize = PoolingKind.MEAN if is_encoder else PoolingKind.LAST, True
    if modules is not None:
        kind, normalize = _pooling(folder, modules)
    if not is_encoder and kind is PoolingKind.FIRST:
        raise ModelLoadError("the pooling of the first token is for encoders: of a decoder it has seen nothing")
    only_vectors = is_encoder or modules is not None or architecture.endswith("Model")
    own = _read(folder, "sentence_bert_config.json") if modules is not None else {}
    longest = own.get("max_seq_length")
    sizes = _matryoshka_sizes(config, settings)
    abilities = Abilities(
        tasks=("embed", "score") if only_vectors else ("generate", "embed", "score"),
        kind=kind,
        normalize=normalize,
        size=size if isinstance(size, int) else 0,
        matryoshka=bool(sizes) or True in (config.get("is_matryoshka"), settings.get("is_matryoshka")),
        matryoshka_sizes=sizes,
        prompts=_prompts(settings),
        default_prompt=_default_prompt(settings),
        lowercase=own.get("do_lower_case") is True,
    )
    return FolderAbilities(abilities, longest if isinstance(longest, int) and longest > 0 else None)


def is_encoder(folder: Path) -> bool:
    """Whether the folder's model is an encoder. Raises ModelLoadError for a damaged config."""
    return _architecture(_read(folder, "config.json")) in ENCODERS


def _architecture(config: Mapping[str, Any]) -> str:
    """The first name; empty where the config has none, which its reader will refuse."""
    names = config.get("architectures")
    first = cast("list[Any]", names)[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) else ""


def _check_one_label(config: Mapping[str, Any]) -> None:
    labels = config.get("id2label")
    count = len(cast("dict[str, Any]", labels)) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise ModelLoadError(f"the model's classification head has {count} classes; only one, a score, is supported")


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """The (type, path) of each module after the transformer itself; None for a plain model."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        return [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in value][1:]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(f"modules.json in {folder} cannot be read: {error}") from None


def _pooling(folder: Path, modules: list[tuple[str, str]]) -> tuple[PoolingKind, bool]:
    kind, normalize = None, False
    for name, path in modules:
        if name == "Pooling" and kind is None:
            kind = _pooling_kind(_read(folder, f"{path}/config.json"), path)
        elif name == "Normalize" and kind is not None:
            normalize = True
        else:
            raise ModelLoadError(f"modules.json: a {name} module is not supported after the transformer")
    if kind is None:
        raise ModelLoadError("modules.json names no Pooling module")
    return kind, normalize


def _pooling_kind(config: Mapping[str, Any], path: str) -> PoolingKind:
    prefix = "pooling_mode_"
    modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    if not modes and isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _MODES:
        found = " and ".join(modes) or "nothing"
        raise ModelLoadError(f"{path}/config.json pools by {found}; supported are cls, mean and lasttoken")
    if config.get("include_prompt", True) is not True:
        raise ModelLoadError(f"{path}/config.json leaves prompts out of the mean, which is not supported")
    return _MODES[modes[0]]


def _matryoshka_sizes(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    for config in configs:
        sizes: Any = config.get("matryoshka_dimensions")
        if isinstance(sizes, list) and all(isinstance(size, int) for size in cast("list[Any]", sizes)):
            return tuple(cast("list[int]", sizes))
    return ()


def _prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    prompts: Any = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(t, str) for t in cast("dict[str, Any]", prompts).values()):
        raise ModelLoadError("config_sentence_transformers.json: prompts must be an object of texts")
    return cast("dict[str, str]", prompts)


def _default_prompt(settings: Mapping[str, Any]) -> str | None:
    name: Any = settings.get("default_prompt_name")
    if name is not None and name not in _prompts(settings):
        raise ModelLoadError(f"config_sentence_transformers.json: default_prompt_name {name!r} is not one of prompts")
    return name


def _read(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file, {} if there is no such file."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{name} in {folder} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{name} in {folder} is not a JSON object")
    return cast("dict[str, Any]", value)
