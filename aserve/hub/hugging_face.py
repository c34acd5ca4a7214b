"""Models by hub id, through huggingface_hub, which keeps its own cache and reads its own environment variables.

Every failure becomes one line with the id and what to do. Called by ``resolve``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from aserve.core.errors import ModelLoadError

_FILES = ("*.json", "*.safetensors", "*.jinja")

_SECOND_COPIES = ("consolidated*", "*/*.safetensors", "*/*.json")
"""The same weights in another form, beside them or in a folder (original/, onnx/); a pattern's * crosses slashes."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_hub_id(model: str) -> bool:
    """Whether a text has the form of a hub id: ``name`` or ``owner/name``."""
    return bool(_HUB_ID.fullmatch(model)) and not model.startswith((".", "-", "/"))


def fetch(model: str, *, revision: str | None, offline: bool, files: Sequence[str] = _FILES) -> Path:
    """Return the local folder of a hub model, downloading what is missing of ``files`` unless ``offline``.

    Raises:
        ModelLoadError: no such model or revision, no permission, no network, not in the cache.
    """
    import httpx
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    offline = offline or constants.HF_HUB_OFFLINE
    try:
        download = cast(Callable[..., str], cast(Any, huggingface_hub).snapshot_download)
        wanted = {"allow_patterns": list(files), "ignore_patterns": list(_SECOND_COPIES)}
        folder = Path(download(model, revision=revision, local_files_only=offline, **wanted))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{model} is a gated model: accept its licence at https://huggingface.co/{model} and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"there is no model {model} on the hub (or it is private and HF_TOKEN is not set)"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"the model {model} has no revision {revision} on the hub") from error
    except LocalEntryNotFoundError as error:
        why = "the hub is switched off (HF_HUB_OFFLINE)" if offline else "the hub cannot be reached"
        raise ModelLoadError(
            f"{model} is no folder and no downloaded model here, and {why}; give the path of a model "
            "folder, or download it where there is a network"
        ) from error
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelLoadError(f"{model} could not be downloaded from the hub: {reason}") from error
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"the hub model {model} has no config.json; only models in Hugging Face form can be taken from the hub"
        )
    return folder
