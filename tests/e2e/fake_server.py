"""A whole server process over ``FakeExecutor``, for soaks and load: what it holds and writes, seen from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SERVE_PROCESS = Path(__file__).parents[1] / "server" / "serve" / "serve_process.py"
START_LIMIT_S = 60


class FakeServer:
    """A context manager; ``options`` are those of ``serve_process``."""

    def __init__(self, log: Path, **options: Any) -> None:
        self._log = log
        with log.open("wb") as out:
            command = [sys.executable, str(SERVE_PROCESS), json.dumps(options)]
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.port = 0

    def __enter__(self) -> FakeServer:
        end = time.monotonic() + START_LIMIT_S
        while "ready on" not in self.output:
            assert self._process.poll() is None and time.monotonic() < end, self.output
            time.sleep(0.05)
        found = re.search(r"ready on https?://[^ ]*:(\d+)", self.output)
        assert found is not None
        self.port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def stop(self, limit_s: float = 60) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(limit_s)
