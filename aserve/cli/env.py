"""The one reader of the environment. Everything else gets its values as arguments.

Three kinds of variables are read: ``ASERVE_<FLAG>`` (any flag of the command line, for example ``ASERVE_MAX_QUEUE``),
where models are cached (``ASERVE_CACHE``, else ``XDG_CACHE_HOME``), and Hugging Face's own ``HF_HUB_OFFLINE``.
Called by the command line only.
"""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "ASERVE_"
CACHE = PREFIX + "CACHE"


def variable_of(flag: str) -> str:
    """Name of the variable that sets a flag: ``--max-queue`` is ``ASERVE_MAX_QUEUE``."""
    return PREFIX + flag.lstrip("-").replace("-", "_").upper()


def settings() -> dict[str, str]:
    """The variables that set flags, by name."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and name != CACHE}


def cache_folder() -> Path:
    """Folder of converted and downloaded models; it need not exist yet."""
    if folder := os.environ.get(CACHE):
        return Path(folder).expanduser()
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "aserve"
    return Path.home() / ".cache" / "aserve"


def offline() -> bool:
    """Whether the hub must not be asked (``HF_HUB_OFFLINE``, as huggingface_hub reads it)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def known() -> dict[str, str | None]:
    """What ``check-env`` shows: variables that change how aserve or its libraries behave, secrets masked."""
    names = ("HF_HUB_OFFLINE", "HF_HOME", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRITON_INTERPRET")
    values = {name: os.environ.get(name) for name in (CACHE, "XDG_CACHE_HOME", *names)} | settings()
    return {name: "(set)" if value and name.endswith(("TOKEN", "API_KEY")) else value for name, value in values.items()}
