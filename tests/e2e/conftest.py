"""Real processes of ``aserve serve`` on a small random model, and clients for them."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from aserve.testing import tiny_llama

START_LIMIT_S = 120
STOP_LIMIT_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ServerProcess:
    """One ``aserve serve`` and what can be seen of it from outside."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def num_open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def gauges(self) -> dict[str, float]:
        """The gauges that tell whether anything is left, by their names without the prefix."""
        text = httpx.get(self.url + "/metrics", timeout=20, trust_env=False).text
        wanted = r"^aserve_(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{.*\})? (\S+)$"
        return {name: float(value) for name, value in re.findall(wanted, text, re.MULTILINE)}

    def wait_idle(self, limit_s: float = 30) -> None:
        end = time.monotonic() + limit_s
        while any((gauges := self.gauges()).values()):
            assert time.monotonic() < end, f"still busy: {gauges}\n{self.log[-3000:]}"
            time.sleep(0.05)

    def wait_ready(self) -> None:
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log[-5000:]
            try:
                if httpx.get(self.url + "/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready:\n{self.log[-5000:]}")

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


Start = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096, eos_token_id=[])


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Start]:
    """``start(*flags)`` gives a ready server; ``command`` replaces the way the process is started."""
    started: list[ServerProcess] = []

    def run(*flags: str, command: tuple[str, ...] = ("-m", "aserve", "serve")) -> ServerProcess:
        port = free_port()
        log = tmp_path_factory.mktemp("log") / "server.log"
        options = ["--port", str(port), "--served-model-name", "M", "--dtype", "float32", *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *command, str(model_folder), *options], stdout=out, stderr=subprocess.STDOUT
            )
        server = ServerProcess(process, port, log)
        started.append(server)
        server.wait_ready()
        return server

    yield run
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def server(start: Start) -> ServerProcess:
    return start()
