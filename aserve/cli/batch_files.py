"""The two files of a batch: opened so that a mistake costs neither the input nor an older output.

Owns encodings (UTF-8 on every terminal) and the lines for files that cannot be used. Called by ``generate``; the batch
between them sees only open text files.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from aserve.core.errors import ConfigError, OutputError


@contextmanager
def reading(path: str) -> Generator[TextIO]:
    """Open the input, ``-`` for stdin. Bytes that are no UTF-8 become lone surrogates, so that only their line fails.

    Raises:
        ConfigError: The file cannot be opened.
    """
    if path == "-" and not _is_of_the_system(sys.stdin):
        yield sys.stdin  # somebody has put another text stream in its place
        return
    # Not sys.stdin itself, whose lock the interpreter wants at exit: a thread may still be waiting for a line. It is
    # not closed either, which would wait for the same lock.
    source = sys.stdin.fileno() if path == "-" else path
    try:
        file = open(source, encoding="utf-8", errors="surrogateescape", closefd=path != "-")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from error
    try:
        yield file
    finally:
        if path != "-":
            file.close()


def check_output(path: str, lines: TextIO) -> None:
    """Say before a model is loaded what would fail after it, or destroy the input.

    Raises:
        ConfigError: The output cannot be opened, or is the file that ``lines`` come from.
    """
    if path == "-":
        return
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if not Path(path).parent.is_dir():
            raise ConfigError(f"cannot open {path}: there is no folder {Path(path).parent}") from None
        return
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from error
    if stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"cannot open {path}: Is a directory")
    if not os.access(path, os.W_OK):
        raise ConfigError(f"cannot open {path}: Permission denied")
    is_file = stat.S_ISREG(found.st_mode) and _is_of_the_system(lines)
    if is_file and os.path.samestat(found, os.fstat(lines.fileno())):
        raise ConfigError(f"{path} is both --input and --output; writing it would destroy what is to be read")


@contextmanager
def writing(path: str) -> Generator[TextIO]:
    """Open and empty the output, ``-`` for stdout.

    Raises:
        ConfigError: The file cannot be opened.
        OutputError: It could not be written to its end.
    """
    if path == "-":
        out: Any = sys.stdout
        if _is_of_the_system(out):
            out.reconfigure(encoding="utf-8")
        yield out
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115  (closed below, where closing may fail)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from error
    try:
        yield file
    finally:
        try:
            file.close()
        except OSError as error:
            raise cannot_write(error) from error


def _is_of_the_system(stream: TextIO) -> bool:
    return isinstance(stream, io.TextIOWrapper)


def cannot_write(error: OSError) -> OutputError:
    """What a batch ends with when its output takes no more: the disk is full, or the reader has left."""
    return OutputError(f"cannot write the output: {error.strerror or error}")
