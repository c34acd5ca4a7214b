"""The cache folder: a model folder appears in it complete, or not at all.

Work is done in a folder of its own and moved into place with one rename. Two processes that make the same model do
the work twice, and the second finds the first one's result; a process that dies leaves only a work folder, which a
later one removes. Files reach the disk before the rename, so that a power cut cannot leave a folder that only looks
complete; a folder that is not complete all the same (somebody deleted files of it) is replaced.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from aserve.core.errors import ModelLoadError

CONVERSION = 1
"""Counts up when converting the same file gives something else, so that folders in caches are made again."""

_STALE_S = 24 * 3600.0

_MAX_RENAMES = 5
"""More than one only where others work on the same folder at the same moment."""


def key_of(name: str, identity: str) -> str:
    """Name of a model's folder; differs when the source's ``identity`` or the way of converting changes."""
    digest = hashlib.sha256(f"{identity} {CONVERSION}".encode()).hexdigest()[:12]
    return f"{name[:64]}-{digest}"


def cached(cache_dir: Path, key: str) -> Path | None:
    """The complete folder of a model, or None."""
    folder = cache_dir / "models" / key
    return folder if _is_complete(folder) else None


def make(cache_dir: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of ``key``, which ``build`` fills if it is not there yet.

    ``build`` gets a work folder that is removed afterwards, and fills its subfolder ``model``, which exists.

    Raises:
        ModelLoadError: what ``build`` raises, or the cache folder cannot be written.
    """
    if folder := cached(cache_dir, key):
        return folder
    folder = cache_dir / "models" / key
    with _one_line(cache_dir):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _work_folder(cache_dir / "work") as work:
            model = work / "model"
            model.mkdir()
            build(work)
            for path in (*model.rglob("*"), model):
                _sync(path)
            _put_in_place(model, folder)
            _sync(folder.parent)
    return folder


def _put_in_place(model: Path, folder: Path) -> None:
    for attempt in range(_MAX_RENAMES):
        try:
            model.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) or attempt == _MAX_RENAMES - 1:
                raise
            if _is_complete(folder):
                return  # another process was faster
            with suppress(FileNotFoundError):  # another process has just done the same
                folder.rename(model.parent / f"incomplete{attempt}")
        else:
            return


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


@contextmanager
def _one_line(cache_dir: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelLoadError(f"no space is left on the disk of {cache_dir}") from error
        raise ModelLoadError(f"{error.filename or cache_dir} cannot be written: {error.strerror or error}") from error


@contextmanager
def _work_folder(parent: Path) -> Generator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.iterdir():
        with suppress(FileNotFoundError):  # its own process has removed it meanwhile
            if time.time() - old.stat().st_mtime > _STALE_S:
                shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
