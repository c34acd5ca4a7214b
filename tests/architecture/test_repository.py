"""What is in the repository: nothing large, nothing of one machine, a changelog fragment's form."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MAX_BYTES = 300_000
FRAGMENT = re.compile(r"\+?[a-z0-9-]+\.(added|changed|fixed|removed)\.md")
MACHINE = re.compile(r"(?<![\w.])/(work|farm|root|home/\w+)/")


@pytest.fixture(scope="module")
def tracked(root) -> list[Path]:
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := root / name).is_file()]


def test_files_are_small(tracked):
    assert not [path for path in tracked if path.stat().st_size > MAX_BYTES]


def test_no_generated_files(tracked):
    suffixes = {".pyc", ".so", ".safetensors", ".gguf", ".log", ".whl"}
    assert not [path for path in tracked if path.suffix in suffixes or "__pycache__" in path.parts]


def test_no_path_of_one_machine(tracked, root):
    texts = [path for path in tracked if path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".txt"}]
    this = Path(__file__)
    assert not [
        path.relative_to(root) for path in texts if path != this and MACHINE.search(path.read_text(encoding="utf-8"))
    ]


def test_changelog_fragments_have_a_kind(root):
    fragments = [path for path in (root / "docs" / "changes").iterdir() if path.name != "README.md"]
    assert not [path.name for path in fragments if not FRAGMENT.fullmatch(path.name)]


def test_every_pin_is_exact(root):
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert not [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin)]
