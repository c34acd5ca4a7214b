"""The process's log on stderr: never in the way of the server, whatever is at its other end, and never endless.

Lines are written by a thread, so that a pipe which nobody reads, a full disk or a closed terminal costs lines and
nothing else; lines that are lost are counted, and the count is written when there is room again. A line is bounded in
length and has no control characters of a client's in it; lines that clients can cause at will are bounded in number.
Owned by ``serve``; knows logging and nothing of HTTP.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

LIMITED = "limited"
"""``extra={LIMITED: kind}`` bounds the number of lines of a logger's ``kind``; warnings and errors always are."""

_LINE_BYTES = 4096
_TRACE_BYTES = 16384
_WAITING_LINES = 4096
_BURST = 50
_PERIOD_S = 10.0
_MOST_KINDS = 256
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class LogWriter:
    """Lines on their way to a file descriptor. ``put`` never waits and never fails, in any thread or signal handler."""

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, text: str) -> None:
        """Write a line, or count it as lost."""
        if self._lines.qsize() < _WAITING_LINES:
            self._lines.put(text.encode("utf-8", "backslashreplace") + b"\n")
        else:
            self._lost += 1

    def flush(self, seconds: float) -> None:
        """Wait until what was put is written, but not for longer than this."""
        done = threading.Event()
        self._lines.put(done)
        done.wait(seconds)

    def _run(self) -> None:
        while True:
            item = self._lines.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                if self._lost and self._write(b"aserve: %d lines of the log were lost\n" % self._lost):
                    self._lost = 0
                if not self._write(item):
                    self._lost += 1

    def _write(self, line: bytes) -> bool:
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:  # a full disk, a closed pipe, no stderr at all
            return False
        return True


class LineFormatter(logging.Formatter):
    """One line a record, bounded; a traceback may follow, indented, so that no line of it looks like a record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = _escape(super().formatMessage(record))
        return line if len(line) <= _LINE_BYTES else f"{line[:_LINE_BYTES]}... ({len(line)} characters)"

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        text = "\n".join("  " + _escape(line) for line in text.split("\n"))
        return text if len(text) <= _TRACE_BYTES else f"{text[: _TRACE_BYTES // 2]}\n...\n{text[-_TRACE_BYTES // 2 :]}"


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Repeats(logging.Filter):
    """Lets 50 lines of a kind pass in 10 seconds; the first after that says how many were left out.

    A kind is a logger with a message before its values are filled in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()  # records come from the engine's thread, too
        self._kinds: OrderedDict[tuple[str, str, str], _Count] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        kind: str | None = getattr(record, LIMITED, None)
        if kind is None and not logging.WARNING <= record.levelno < logging.CRITICAL:
            return True
        key = (record.name, str(record.msg)[:200], kind or "")
        with self._lock:
            count = self._kinds.setdefault(key, _Count(self._clock()))
            self._kinds.move_to_end(key)
            if len(self._kinds) > _MOST_KINDS:
                self._kinds.popitem(last=False)
            passes, left_out = count.next(self._clock())
        if passes and left_out:
            record.msg = f"{record.msg} ({left_out} lines like this one were left out)"
        return passes


class _Count:
    def __init__(self, now: float) -> None:
        self._since = now
        self._passed = 0
        self._left_out = 0

    def next(self, now: float) -> tuple[bool, int]:
        """Whether one more line passes, and how many did not since the last period."""
        left_out = 0
        if now - self._since >= _PERIOD_S:
            self._since, self._passed = now, 0
            left_out, self._left_out = self._left_out, 0
        self._passed += 1
        if self._passed > _BURST:
            self._left_out += 1
        return self._passed <= _BURST, left_out


class _Handler(logging.Handler):
    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record))
        except Exception as error:  # a record that cannot be formatted must not end what logged it
            self._writer.put(f"aserve: a line of the log could not be formatted: {error!r}")


def configure_logging(writer: LogWriter, level: str) -> None:
    """Our log as asked for, of libraries the warnings: hpack's debug log, for one, contains every API key."""
    handler = _Handler(writer)
    handler.setFormatter(LineFormatter())
    handler.addFilter(Repeats())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("aserve").setLevel(level.upper())


def open_standard_files() -> None:
    """Open /dev/null where stdin, stdout or stderr is closed: the next socket would get the number, and the log."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
