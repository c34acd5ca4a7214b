"""A server process with an engine double in it, and what can be done to it."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "guard")]  # the clients


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "trio")


class Process:
    """A running server; everything that it writes is in ``output``."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, "-W", "error", str(HERE / "serve_process.py"), json.dumps(options)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line

    def says(self, pattern: str, seconds: float = 20) -> re.Match[str]:
        """Wait for a line."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := re.search(pattern, self.output):
                return found
            time.sleep(0.01)
        raise AssertionError(f"no {pattern!r} in:\n{self.output}")

    @property
    def port(self) -> int:
        return int(self.says(r"listening on https?://[^ ]*:(\d+)")[1])

    def ready(self) -> int:
        self.says("ready on")
        return self.port

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 20) -> int:
        """The exit code."""
        code = self._process.wait(seconds)
        self._reader.join(5)
        return code

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        self._reader.join(5)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(**options: Any) -> Process:
        started.append(Process(**options))
        return started[-1]

    yield make
    for process in started:
        process.end()
