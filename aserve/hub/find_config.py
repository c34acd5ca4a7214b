"""The ``config.json`` of a model, without its weights: for who only wants to know how large it is.

What a user may call a model is the same as in ``resolve``, and a ``config.json`` by itself. Nothing is converted, and
of a hub model only the config is downloaded. Called by ``aserve plan``; blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from aserve.core.errors import ModelLoadError
from aserve.hub import hugging_face
from aserve.hub.builtin import BUILTIN_MODELS

_NAME = "config.json"


def find_config(model: str, *, revision: str | None = None, offline: bool = False) -> Mapping[str, Any]:
    """Return the parsed config of a model.

    Args:
        model: a built-in name, a folder, a config.json or .gguf file, or a hub id.
        revision: of a hub id.
        offline: do not use a network.

    Raises:
        ModelLoadError: one line that names the model and what to do.
    """
    path = Path(model).expanduser()
    is_builtin = model in BUILTIN_MODELS
    is_path = not is_builtin and _exists(path)
    if revision is not None and (is_builtin or is_path):
        raise ModelLoadError(f"--revision goes with a hub id, but {model} is none")
    if is_builtin:
        return BUILTIN_MODELS[model].config
    if is_path:
        return _of_path(model, path)
    if not hugging_face.is_hub_id(model) or model.endswith((".gguf", ".json")):
        raise ModelLoadError(f"there is no file or folder {model}")
    return _read(hugging_face.fetch(model, revision=revision, offline=offline, files=(_NAME,)) / _NAME)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no permission to look, a name that is too long, or no name at all
        return False


def _of_path(model: str, path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        if not (path / _NAME).is_file():
            raise ModelLoadError(f"the folder {model} has no {_NAME}, so it is no Hugging Face model folder")
        return _read(path / _NAME)
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelLoadError(f"{model} cannot be read: {error.strerror or error}") from error
    if not is_gguf:
        return _read(path)
    from aserve.hub.gguf_config import check_architecture, model_config
    from aserve.hub.gguf_file import GgufFile

    gguf = GgufFile(path)
    check_architecture(gguf)
    return model_config(gguf)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # of JSON or of UTF-8
        raise ModelLoadError(f"{path} is not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return cast("dict[str, Any]", config)
