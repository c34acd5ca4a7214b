"""The command line starts quickly: nothing heavy is imported before a command needs it."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from aserve.cli.main import main

HEAVY = ("torch", "transformers", "hypercorn", "quart", "pydantic", "numpy", "anyio", "huggingface_hub")


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["version"], ["serve", "M", "--show-config"]])
def test_nothing_heavy_is_imported(arguments):
    script = f"import sys, aserve.cli.main as m; m.main({arguments}); sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(HEAVY).isdisjoint(done.stderr.split())


def test_version(capsys):
    assert main(["version"]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{metadata.version('aserve')}\n" * 2


def test_a_source_tree_that_is_not_installed_has_no_version(capsys, monkeypatch):
    def not_found(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_found)
    assert main(["version"]) == 0
    assert capsys.readouterr().out == "unknown (not installed)\n"
    assert main(["serve", "M", "--show-config"]) == 0


def test_help_without_a_command(capsys):
    assert main([]) == 0
    assert "Usage: aserve COMMAND" in capsys.readouterr().out


def test_check_env(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert main(["check-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cache"] == {
        "folder": str(tmp_path / "cache"),
        "exists": False,
        "writable": True,
        "free_bytes": found["cache"]["free_bytes"],
        "models": [],
    }
    assert found["packages"]["torch"] == found["torch"]["version"]
    assert found["variables"]["HF_TOKEN"] == "(set)"
    assert main(["check-env"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    assert str(tmp_path / "cache") in text
    assert f"CPU kernels {found['torch']['cpu_kernels']}" in text


def test_check_env_says_why_the_cpu_kernels_are_not_compiled(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["check-env"]) == 0
    assert "CPU kernels torch; no C compiler" in capsys.readouterr().out


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "aserve", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == metadata.version("aserve")
