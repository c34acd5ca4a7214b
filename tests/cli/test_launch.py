"""Progress on a terminal: a bar while a model is fetched and loaded, and a line of its own for everything else."""

import io
from contextlib import asynccontextmanager

import anyio
import pytest

from aserve.cli.launch import engine_opener, progress_bar
from aserve.cli.main import main
from aserve.core.config import EngineConfig, ModelConfig
from aserve.core.errors import ModelLoadError


class Screen(io.StringIO):
    """A terminal; ``lines`` is what can be read on it in the end."""

    def isatty(self):
        return True

    @property
    def lines(self):
        return [line.rpartition("\r")[2].strip() for line in self.getvalue().split("\n")]


def look_at(monkeypatch):
    """Not a fixture: pytest sets stderr anew between fixtures and the test."""
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    return screen


def test_a_bar_appears_at_the_first_call_and_goes_with_the_last_byte(monkeypatch):
    screen = look_at(monkeypatch)
    with progress_bar("fetching it") as show:
        assert screen.getvalue() == ""
        show(0, 100)
        assert "fetching it" in screen.getvalue()
        show(100, 100)
        assert screen.lines == [""]
        seen = screen.getvalue()
        show(100, 100)
        assert screen.getvalue() == seen


def test_nothing_is_shown_without_a_terminal(capsys):
    with progress_bar("fetching it") as show:
        show(1, 2)
    assert capsys.readouterr().err == ""


def test_fetching_and_loading_are_shown_and_gone_before_the_first_answer(monkeypatch):
    screen = look_at(monkeypatch)

    @asynccontextmanager
    async def open_engine(config, *, fetch_progress, progress, **_):
        assert screen.getvalue() == ""
        fetch_progress(1, 2)
        assert "fetching M" in screen.getvalue()
        fetch_progress(2, 2)
        assert "loading" not in screen.getvalue()
        progress(1, 2)
        assert "loading" in screen.getvalue()
        yield "engine"

    monkeypatch.setattr("aserve.assembly.open_engine", open_engine)

    async def run():
        async with engine_opener()(EngineConfig(model=ModelConfig(model="M"))) as engine:
            assert engine == "engine"
            assert screen.lines == [""]

    anyio.run(run, backend="trio")


@pytest.mark.parametrize("command", [["generate", "M"], ["chat", "M"], ["pull", "M"]])
def test_a_failure_has_its_line_to_itself(monkeypatch, command):
    screen = look_at(monkeypatch)

    def resolve(name, *, progress, **_):
        progress(1, 2)
        raise ModelLoadError("the model is damaged")

    monkeypatch.setattr("aserve.assembly.resolve", resolve)
    monkeypatch.setattr("aserve.hub.resolve", resolve)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(command) == 1
    assert "fetching M" in screen.getvalue()
    assert screen.lines[-2:] == ["aserve: error: the model is damaged", ""]
