"""``aserve check-env``: what a bug report needs to say about the machine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from aserve.cli import env

PACKAGES = (
    "aserve", "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "numpy",
    "anyio", "trio", "hypercorn", "h2", "quart", "quart-trio", "pydantic", "orjson", "cyclopts", "httpx", "openai",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Environment:
    """Facts about this machine, as shown and as JSON."""

    platform: str
    python: str
    executable: str
    cores: int
    memory_bytes: int | None
    packages: dict[str, str | None]
    torch: dict[str, Any]
    cache: dict[str, Any]
    variables: dict[str, str | None]


def check_env(*, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> int:
    """Show platform, Python, packages, torch, GPUs and the cache folder. Exit code 1 if aserve cannot run here.

    Parameters
    ----------
    as_json
        One JSON object instead of text.
    """
    environment = look()
    if as_json:
        print(json.dumps(asdict(environment), indent=2))
    else:
        print(_text(environment))
    return 1 if "error" in environment.torch else 0


def look() -> Environment:
    """Read the facts off the machine."""
    return Environment(
        platform=platform.platform(),
        python=platform.python_version(),
        executable=sys.executable,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        packages={name: _version(name) for name in PACKAGES},
        cache=_cache(env.cache_folder()),
        torch=_torch(env.cache_folder()),
        variables={name: value for name, value in env.known().items() if value is not None},
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _torch(cache_dir: Path) -> dict[str, Any]:
    """What torch is and finds, and in which form the CPU's kernels are here; they are compiled if they never were."""
    try:
        import torch

        from aserve_kernels import load
    except (ImportError, OSError) as error:  # OSError: a shared library of another machine
        return {"error": f"torch cannot be imported: {' '.join(str(error).split())}"}
    cuda: Any = torch.cuda  # its types are partly unknown
    devices = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_available": cuda.is_available(),
        "devices": [
            {"name": d.name, "memory_bytes": d.total_memory, "capability": f"{d.major}.{d.minor}"} for d in devices
        ],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": load("cpu", cache_dir).form,
    }


def _cache(folder: Path) -> dict[str, Any]:
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    models = sorted(path.name for path in (folder / "models").glob("*/"))
    return {
        "folder": str(folder),
        "exists": folder.is_dir(),
        "writable": os.access(existing, os.W_OK),
        "free_bytes": shutil.disk_usage(existing).free,
        "models": models,
    }


def _text(environment: Environment) -> str:
    cache, torch = environment.cache, environment.torch
    lines = [
        ("platform", environment.platform),
        ("python", f"{environment.python} ({environment.executable})"),
        ("machine", f"{environment.cores} cores, {_gib(environment.memory_bytes)} memory"),
        ("torch", torch.get("error") or f"{torch['version']}, {torch['threads']} threads, {torch['cpu_capability']}"),
        *(("CPU kernels", torch[key]) for key in ("cpu_kernels",) if key in torch),
        *(("GPU", f"{d['name']}, {_gib(d['memory_bytes'])}") for d in torch.get("devices", ())),
        (
            "cache",
            f"{cache['folder']}{'' if cache['exists'] else ' (not there yet)'}, {_gib(cache['free_bytes'])} free"
            + ("" if cache["writable"] else ", NOT WRITABLE"),
        ),
        ("models", ", ".join(cache["models"]) or "none in the cache; try: aserve pull smollm2-135m"),
        *(("variable", f"{name}={value}") for name, value in environment.variables.items()),
        *(("package", f"{name} {found or 'is not installed'}") for name, found in environment.packages.items()),
    ]
    if not torch.get("devices") and "error" not in torch:
        lines.insert(5, ("GPU", "none that this torch can use"))
    return "\n".join(f"{name:11} {text}" for name, text in lines)


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
