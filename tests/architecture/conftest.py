"""The sources as syntax trees."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aserve", "aserve_kernels")


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Path from the root, for messages."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def dotted(self) -> str:
        """The importable name."""
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def modules() -> tuple[Module, ...]:
    """Every module of both packages."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return tuple(Module(path, text, ast.parse(text)) for path, text in texts.items())
