"""The cache folder under other processes, and under power cuts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from aserve.core.errors import ModelLoadError
from aserve.hub import cache


def build(work: Path) -> None:
    (work / "model" / "config.json").write_text("{}")
    (work / "model" / "weights").write_text("new")


@pytest.mark.parametrize("left", ["weights", None])
def test_an_incomplete_folder_is_replaced(tmp_path: Path, left: str | None) -> None:
    folder = tmp_path / "models" / "key"
    folder.mkdir(parents=True)
    if left is not None:
        (folder / left).write_text("old")
    assert cache.make(tmp_path, "key", build) == folder
    assert (folder / "weights").read_text() == "new"
    assert (folder / "config.json").is_file()
    assert not any((tmp_path / "work").iterdir())


def test_a_file_in_the_folders_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "key").write_text("")
    assert (cache.make(tmp_path, "key", build) / "config.json").is_file()


def test_a_complete_folder_that_another_process_made_meanwhile_is_kept(tmp_path: Path) -> None:
    def build_slowly(work: Path) -> None:
        build(work)
        folder = tmp_path / "models" / "key"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text("theirs")

    folder = cache.make(tmp_path, "key", build_slowly)
    assert (folder / "weights").read_text() == "theirs"


def test_a_work_folder_may_vanish_while_old_ones_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "work" / "theirs"
    theirs.mkdir(parents=True)
    listed = Path.iterdir

    def iterdir(self: Path) -> Any:
        found = list(listed(self))
        shutil.rmtree(theirs, ignore_errors=True)  # its process is done
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert cache.make(tmp_path, "key", build).is_dir()


def test_files_are_on_the_disk_before_the_folder_is_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / "key"
    early: set[str] = set()
    late: set[str] = set()

    def fsync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        (late if folder.exists() else early).add(name)

    monkeypatch.setattr(os, "fsync", fsync)
    cache.make(tmp_path, "key", build)
    assert early == {"config.json", "weights", "model"}
    assert late == {"models"}


def test_a_folder_that_cannot_be_put_in_place_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(self: Path, target: Path) -> None:
        raise OSError(39, "Directory not empty", str(target))

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ModelLoadError, match="cannot be written: Directory not empty"):
        cache.make(tmp_path, "key", build)
