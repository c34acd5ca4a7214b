"""The log: bounded lines, bounded numbers of them, and a writer that nobody has to wait for."""

import logging
import os
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from aserve.server.log import LIMITED, LineFormatter, LogWriter, Repeats


def record(message: str, *args: object, level: int = logging.WARNING, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("aserve.x", level, "x.py", 1, message, args, None)
    made.__dict__.update(extra)
    return made


def test_a_line_is_one_line_and_bounded() -> None:
    """What a client has put into it cannot begin another line, nor fill a disk."""
    line = LineFormatter().format(record("seen %s", "a\r\n2026 ERROR forged\x1b[2J\u2028b\0" + "c" * 10**6))
    assert "\n" not in line and "\r" not in line and "\x1b" not in line and "\u2028" not in line and "\0" not in line
    assert "\\r\\n2026 ERROR forged" in line and len(line) < 5000 and "characters)" in line


def test_a_traceback_is_bounded() -> None:
    try:
        raise ValueError("v" * 10**6)
    except ValueError as error:
        made = record("failed")
        made.exc_info = (type(error), error, error.__traceback__)
    assert "Traceback" in (text := LineFormatter().format(made)) and len(text) < 20_000


def test_an_exception_begins_no_record() -> None:
    """What it says may be a client's words."""
    try:
        raise ValueError("x\n2026-01-01 00:00:00,000 ERROR forged\r\x1b[2J\u2028y")
    except ValueError as error:
        made = record("failed")
        made.exc_info = (type(error), error, error.__traceback__)
    first, *others = LineFormatter().format(made).splitlines()
    assert first.endswith("failed") and "Traceback" in others[0]
    assert (
        all(line.startswith("  ") for line in others) and "  2026-01-01 00:00:00,000 ERROR forged\\r\\x1b" in others[-1]
    )


class Slow(OrderedDict):
    """Another thread has its turn as soon as the oldest kind is found."""

    def setdefault(self, key, default):
        found = super().setdefault(key, default)
        if key[1] == "kind 0":
            time.sleep(0.2)
        return found


def test_threads_share_the_counts() -> None:
    """A kind that one has found is not thrown out by another before it is counted."""
    repeats = Repeats(lambda: 0.0)
    for n in range(256):
        repeats.filter(record(f"kind {n}"))
    repeats._kinds = Slow(repeats._kinds)
    with ThreadPoolExecutor(1) as pool:
        oldest = pool.submit(repeats.filter, record("kind 0"))
        time.sleep(0.05)
        assert repeats.filter(record("another")) and oldest.result()


def test_closed_standard_files_are_opened() -> None:
    """Else the listener would be number 2, and lines of the log its connections' data."""
    code = "import os\nfrom aserve.server.log import open_standard_files\nfor n in {}: os.close(n)\n"
    code += "open_standard_files()\nassert os.open('/', os.O_RDONLY) == 3\nos.fstat(0), os.write(2, b'')\n"
    for closed in ("(2,)", "(0, 2)", "(0, 1, 2)", "()"):
        assert subprocess.run([sys.executable, "-c", code.format(closed)], check=False, timeout=60).returncode == 0


def test_repeated_lines_are_left_out_and_counted() -> None:
    now = 0.0
    repeats = Repeats(lambda: now)
    assert sum(repeats.filter(record("client %d", n)) for n in range(500)) == 50
    assert repeats.filter(record("another one"))
    assert sum(repeats.filter(record("info %d", n, level=logging.INFO)) for n in range(500)) == 500
    refused = [record("refused", level=logging.INFO, **{LIMITED: "401"}) for _ in range(60)]
    assert sum(map(repeats.filter, refused)) == 50
    assert repeats.filter(record("refused", level=logging.INFO, **{LIMITED: "404"}))
    assert all(repeats.filter(record("end", level=logging.CRITICAL)) for _ in range(60))
    now = 10.0
    assert repeats.filter(late := record("client %d", 1))
    assert late.getMessage() == "client 1 (450 lines like this one were left out)"


def test_kinds_of_lines_are_bounded() -> None:
    repeats = Repeats(lambda: 0.0)
    for n in range(5000):
        repeats.filter(record(f"kind {n}"))
    assert len(repeats._kinds) <= 256


def test_writer_never_waits() -> None:
    """Its reader sleeps: lines are kept up to a limit, then lost and counted; later ones arrive."""
    reading, writing = os.pipe()
    log = LogWriter(writing)
    for n in range(20_000):
        log.put(f"line {n} " + "x" * 100)
    log.flush(0.05)
    seen = b""
    while b"lines of the log were lost" not in seen:
        seen += os.read(reading, 65536)
        log.put("again")
    assert b"line 0 " in seen and seen.count(b"line ") < 20_000
    while b"the last\n" not in seen:
        log.put("the last")  # lost while others still wait
        seen += os.read(reading, 65536)
    log.flush(5)
    os.close(reading)
    log.put("into nothing")
    log.flush(5)
    os.close(writing)
