"""A conversation: history, mistakes, Ctrl-C and Ctrl-D in a real terminal."""

import os
import pty
import select
import sys
import textwrap
import time

import pytest

from aserve.cli.main import main


@pytest.fixture
def typed(monkeypatch):
    """What the user types, line by line; the end of the list is the end of the input."""
    lines = []

    def read(_):
        if not lines:
            raise EOFError
        line = lines.pop(0)
        if line is KeyboardInterrupt:
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    return lines


@pytest.mark.usefixtures("fake_engine")
class TestConversation:
    def test_answers_depend_on_the_history(self, capsys, typed):
        typed += ["hello", "hello", "/new", "hello"]
        assert main(["chat", "M", "--max-tokens", "8"]) == 0
        first, second, fresh = capsys.readouterr().out.splitlines()
        assert len(first) == 8
        assert first == fresh
        assert first != second

    def test_system_message(self, capsys, typed):
        typed += ["hello"]
        assert main(["chat", "M", "--max-tokens", "8"]) == 0
        typed += ["hello"]
        assert main(["chat", "M", "--max-tokens", "8", "--system", "Be brief."]) == 0
        plain, directed = capsys.readouterr().out.splitlines()
        assert plain != directed

    def test_a_question_that_does_not_fit_is_forgotten(self, capsys, typed):
        typed += ["hello", "/new", "x" * 400, "hello"]
        assert main(["chat", "M", "--max-tokens", "8"]) == 0
        output, error = capsys.readouterr()
        assert error.startswith("aserve: error: ")
        assert "256" in error
        first, second = output.splitlines()
        assert first == second

    def test_ctrl_c_at_the_prompt_goes_on(self, capsys, typed):
        typed += [KeyboardInterrupt, "hello"]
        assert main(["chat", "M", "--max-tokens", "8"]) == 0
        output, error = capsys.readouterr()
        assert len(output.splitlines()) == 1
        assert "Ctrl-D leaves" in error

    def test_the_engines_death_ends_it(self, capsys, typed, executor):
        executor._fail_at_step = 3
        typed += ["hello", "hello"]
        assert main(["chat", "M", "--max-tokens", "8"]) == 1
        assert capsys.readouterr().err == "aserve: error: the engine has failed and serves no more requests\n"

    def test_wrong_options_are_one_line(self, capsys, typed):
        typed += ["hello"]
        assert main(["chat", "M", "--temperature", "-1"]) == 0
        assert "temperature must be" in capsys.readouterr().err


PROGRAM = """
import sys
from contextlib import asynccontextmanager
from pathlib import Path
import anyio
from aserve.cli import launch
from aserve.cli.main import main
from aserve.core.capacity import Capacity
from aserve.engine.engine import run_engine
from aserve.testing import FakeExecutor, write_byte_tokenizer
from aserve.text.tokenizer import Tokenizer

folder = Path(sys.argv[1])
write_byte_tokenizer(folder)
capacity = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_batch_tokens=64, max_model_len=1000)

@asynccontextmanager
async def open_engine(config):
    async with run_engine(executor_factory=lambda: FakeExecutor(capacity, step_s=0.02),
                          tokenizer=Tokenizer.load(folder), config=config, model_names=("M",)) as engine:
        yield engine
        with anyio.fail_after(10):  # an answer that goes on would take longer
            await engine.wait_idle()

launch.engine_opener = lambda **_: open_engine
sys.exit(main(["chat", "M"]))
"""


class Terminal:
    """A child process on a pseudo-terminal."""

    def __init__(self, arguments):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, *arguments])
        self.seen = ""

    def expect(self, text, seconds=60):
        """Read until ``text`` has come after what was expected before; returns what came up to it."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.fd, 4096).decode()
            except OSError:  # the child has closed its end
                raise AssertionError(f"the program ended; no {text!r} in {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text):
        os.write(self.fd, text.encode())

    def exit_code(self):
        try:
            while os.read(self.fd, 4096):
                pass
        except OSError:
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path):
    terminal = Terminal(["-c", textwrap.dedent(PROGRAM), str(tmp_path)])
    terminal.expect(">>> ")
    terminal.type("hello\n")
    terminal.expect("hello\r\n")
    while not terminal.seen.strip():  # the first letters of an endless answer
        terminal.seen += os.read(terminal.fd, 4096).decode()
    terminal.type("\x03")
    terminal.expect(">>> ", seconds=10)
    terminal.type("\x04")
    assert terminal.exit_code() == 0
