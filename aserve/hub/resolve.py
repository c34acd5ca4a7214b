"""From what a user calls a model to a folder in Hugging Face form.

A name is looked for in this order: built-in name, path of a folder or file, hub id. Converting and downloading is done
once, into the cache folder. Called by the composition root and by ``aserve pull``; blocks, so not for an event loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from aserve.core.errors import ModelLoadError
from aserve.hub import cache, hugging_face
from aserve.hub.builtin import BUILTIN_MODELS
from aserve.hub.pull_builtin import Progress, pull_builtin


def resolve(
    model: str, *, cache_dir: Path, revision: str | None = None, offline: bool = False, progress: Progress | None = None
) -> Path:
    """Return the folder of a model, getting or converting it first if needed.

    Args:
        model: a built-in name, a Hugging Face folder, a .gguf file, or a hub id.
        cache_dir: where converted models are kept; made when needed.
        revision: of a hub id.
        offline: do not use a network.
        progress: told about bytes while downloading a built-in model and while converting.

    Raises:
        ModelLoadError: one line that names the model and what to do.
    """
    path = Path(model).expanduser()
    kind = "built-in" if model in BUILTIN_MODELS else _kind(path)
    if kind is not None and revision is not None:
        raise ModelLoadError(f"--revision goes with a hub id, but {model} is none")
    if kind == "built-in":
        return pull_builtin(BUILTIN_MODELS[model], cache_dir=cache_dir, offline=offline, progress=progress)
    if kind == "folder":
        return _folder(model, path)
    if kind == "file":
        return _gguf(model, path, cache_dir, progress)
    if not hugging_face.is_hub_id(model) or model.endswith(".gguf"):
        raise ModelLoadError(f"there is no file or folder {model}")
    return hugging_face.fetch(model, revision=revision, offline=offline)


def _kind(path: Path) -> Literal["folder", "file"] | None:
    try:
        return "folder" if path.is_dir() else "file" if path.is_file() else None
    except OSError:  # no permission to look, or a name that is too long
        return None


def _folder(model: str, path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    if (path / "adapter_config.json").is_file():
        raise ModelLoadError(
            f"the folder {model} holds an adapter (LoRA) and not the model it was trained on: merge the two "
            "into one folder and give the path of that"
        )
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    if ggufs:
        raise ModelLoadError(
            f"the folder {model} has no config.json, but GGUF files: give the path of one, such as "
            f"{Path(model) / ggufs[0]}"
        )
    state = "has no config.json, so it is no Hugging Face model folder" if any(path.iterdir()) else "is empty"
    raise ModelLoadError(f"the folder {model} {state}")


def _gguf(model: str, path: Path, cache_dir: Path, progress: Progress | None) -> Path:
    from aserve.hub.gguf_convert import convert_gguf

    try:
        with path.open("rb") as file:
            magic = file.read(4)
        stat = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{model} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelLoadError(
            f"the file {model} is no GGUF file; a model is a GGUF file, a Hugging Face folder, a hub "
            f"id, or one of {', '.join(sorted(BUILTIN_MODELS))}"
        )
    key = cache.key_of(path.stem, f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return cache.make(cache_dir, key, lambda work: convert_gguf(path, work / "model", progress=progress))
