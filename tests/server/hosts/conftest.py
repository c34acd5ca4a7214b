"""Starts the application under each host that it is made for."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "guard")]
GAUGES = r"^aserve_(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{.*\})? (\S+)$"


class Host:
    """A server process; all that it writes is in ``output``."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        path = os.pathsep.join([str(HERE.parent / "serve"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "host_process.py"), name, json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line

    def wait_for(self, what: Callable[[], Any], seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end, f"{self.name}:\n{self.output}"
            time.sleep(0.02)
        return found

    @property
    def url(self) -> str:
        found = self.wait_for(lambda: re.search(r"port (\d+)", self.output))
        return f"http://127.0.0.1:{found[1]}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, trust_env=False)

    def is_ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def is_idle(self) -> bool:
        """Whether no request holds anything in the engine."""
        return not any(float(value) for _, value in re.findall(GAUGES, self.get("/metrics").text, re.MULTILINE))

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(60)
        self._reader.join(5)
        return code

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        assert self._process.stdout is not None
        self._process.stdout.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from host_names import HOSTS

    if "host" in metafunc.fixturenames:
        metafunc.parametrize("host", HOSTS, indirect=True, scope="module")


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """One process per host for the tests of a module."""
    process = Host(request.param, step_s=0.002)
    process.wait_for(process.is_ready)
    yield process
    process.end()


@pytest.fixture
def start() -> Iterator[Callable[..., Host]]:
    """A process of a test's own."""
    started: list[Host] = []

    def make(name: str, **options: Any) -> Host:
        started.append(Host(name, **options))
        return started[-1]

    yield make
    for process in started:
        process.end()
