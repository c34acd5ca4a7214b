"""Puts the helpers beside the tests on their import path; everything here runs on trio."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.fixture(autouse=True)
def close_peers() -> Iterator[None]:
    """Closes what a test left open."""
    from guard_client import Peer

    yield
    while Peer.all:
        Peer.all.pop().plain.socket._sock.close()  # trio's own close needs a running loop


class Stock:
    """Unpatched hypercorn in a process of its own, started anew when a test has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    def port(self, **settings: Any) -> int:
        if not self.alive():
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "guard_stock.py"), json.dumps(settings)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert self._process.stdout is not None
            self._port = int(self._process.stdout.readline())
        return self._port

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self, seconds: float) -> bool:
        """SIGTERM; whether it ends within this time."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from guard_client import make_certificate

    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stock() -> Iterator[Stock]:
    server = Stock()
    yield server
    server.end()
