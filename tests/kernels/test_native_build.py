"""Compiling the kernels in C: once, by anybody, anywhere; and torch's forms where it cannot be."""

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from aserve_kernels import cpu
from aserve_kernels.cpu.native import build
from aserve_kernels.cpu.native.library import load_library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A source that is compiled in no time, and the cache folder."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "native.c").write_text("int answer(void) { return 42; }")
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setattr(build, "_FLAGS", ("-shared", "-fPIC"))
    return tmp_path / "cache"


def test_it_is_compiled_once(quick, monkeypatch):
    library, path = build.open_library(quick)
    assert library.answer() == 42
    assert [path] == list((quick / "kernels").iterdir())
    monkeypatch.setattr(build.subprocess, "run", None)
    assert build.open_library(quick)[1] == path


def test_another_source_or_compiler_or_cpu_is_another_file(quick, monkeypatch):
    paths = [build.open_library(quick)[1]]
    (build._SOURCES / "native.c").write_text("int answer(void) { return 43; }")
    library, path = build.open_library(quick)
    assert library.answer() == 43
    paths += [path, build.open_library(quick, extra_flags=("-O1",))[1]]
    monkeypatch.setattr(build, "_cpu_features", lambda: b"another")
    paths.append(build.open_library(quick)[1])
    assert len(set(paths)) == 4


def test_a_damaged_file_is_replaced(quick):
    _, path = build.open_library(quick)
    size = path.stat().st_size
    path.unlink()  # this process still has the other mapped
    path.write_bytes(b"")
    library, again = build.open_library(quick)
    assert (library.answer(), again, again.stat().st_size) == (42, path, size)


@pytest.mark.parametrize("fault", ["group can write", "all can write", "owned by another"])
def test_what_others_could_have_put_there_is_not_run(quick, monkeypatch, fault):
    source = build._SOURCES / "native.c"
    wanted = source.read_text()
    source.write_text("int answer(void) { return 13; }")
    _, planted = build.open_library(quick)
    source.write_text(wanted)
    _, path = build.open_library(quick)
    path.unlink()
    planted.rename(path)
    if fault == "owned by another" and os.getuid() == 0:
        os.chown(path, 12345, -1)
    elif fault == "owned by another":
        monkeypatch.setattr(build.os, "getuid", lambda: 12345)
    else:
        path.chmod(0o775 if fault == "group can write" else 0o757)
    library, again = build.open_library(quick)
    assert (library.answer(), again) == (42, path)


@pytest.mark.parametrize("fault", ["group can write", "all can write", "owned by another", "a link"])
def test_a_folder_in_which_others_can_write_is_not_used(quick, monkeypatch, fault):
    source = build._SOURCES / "native.c"
    wanted = source.read_text()
    source.write_text("int answer(void) { return 13; }")
    _, planted = build.open_library(quick)
    source.write_text(wanted)
    _, path = build.open_library(quick)
    path.unlink()
    planted.rename(path)
    folder = path.parent
    if fault == "a link":
        folder.rename(quick / "elsewhere")
        folder.symlink_to(quick / "elsewhere")
    elif fault == "owned by another":
        lstat = build.Path.lstat
        theirs = SimpleNamespace(st_mode=0o40755, st_uid=12345)
        monkeypatch.setattr(build.Path, "lstat", lambda self: theirs if self == folder else lstat(self))
    else:
        folder.chmod(0o775 if fault == "group can write" else 0o757)
    library, again = build.open_library(quick)
    assert (library.answer(), again) == (42, None)


def test_the_cache_folder_is_the_users_own_with_any_umask(quick):
    before = os.umask(0o002)
    try:
        _, path = build.open_library(quick)
    finally:
        os.umask(before)
    assert path is not None
    assert path.parent.stat().st_mode & 0o022 == 0


def test_a_cache_folder_that_cannot_be_written_is_done_without(quick):
    quick.write_text("a file is in its place")
    library, path = build.open_library(quick)
    assert library.answer() == 42
    assert path is None


def test_a_user_without_a_home_is_served(quick, monkeypatch):
    def fail(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "expanduser", fail)
    library, path = build.open_library(None)
    assert (library.answer(), path) == (42, None)


def test_no_folder_at_all_is_a_reason_and_no_failure(quick, monkeypatch):
    def refuse(*_, **__):
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(build.BuildError, match="no folder to compile in: No usable temporary directory"):
        build.open_library(quick)


def test_those_who_start_together_agree(quick):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: build.open_library(quick), range(4)))
    assert {library.answer() for library, _ in results} == {42}
    assert {path for _, path in results} == set((quick / "kernels").iterdir())


@pytest.mark.parametrize("found", ["nothing", "a compiler that fails", "one that writes nothing", "one that hangs"])
def test_without_a_working_compiler_torch_computes_and_one_line_says_why(found, tmp_path, monkeypatch, caplog):
    scripts = {
        "a compiler that fails": "echo 'native.c:1: error: no such luck' >&2; exit 1",
        "one that writes nothing": "exit 0",
        "one that hangs": "exec /bin/sleep 30",
    }
    tools = tmp_path / "bin"
    tools.mkdir()
    if found in scripts:
        (tools / "cc").write_text(f"#!/bin/sh\n{scripts[found]}\n")
        (tools / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(build, "_TIMEOUT_S", 0.3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kernels = cpu.load_kernels(tmp_path / "cache")
    load_library.cache_clear()
    assert kernels.name == "cpu"
    assert kernels.form.startswith("torch; ")
    assert kernels.rms_norm is cpu.TORCH_KERNELS.rms_norm
    [line] = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert "slower" in line
    if found == "nothing":
        assert "no C compiler" in line
    if found == "a compiler that fails":
        assert "no such luck" in line
    assert not list((tmp_path / "cache").glob("kernels/*"))
