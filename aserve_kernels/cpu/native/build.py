"""Compiles the C sources beside this file for the very machine, once, into a folder of the user's cache.

The file's name is a digest of all that decides its contents (sources, flags, compiler, the CPU's features), so nothing
in the folder is ever stale, and a folder shared by different machines holds one file for each kind. It appears by one
rename: processes that start together compile twice and agree. Where the folder cannot be written, or others can write
it, the library is compiled into a temporary one and deleted once it is loaded. Knows nothing of what the library does.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

DEFAULT_FOLDER: Final = Path("~/.cache/aserve")
_SOURCES: Final = Path(__file__).parent
_COMPILERS: Final = ("cc", "gcc", "clang")
_TIMEOUT_S: Final = 60.0
_FLAGS: Final = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fopenmp-simd", "-fno-math-errno",
    "-fno-trapping-math", "-ffp-contract=fast", "-Wno-unknown-warning-option", "-Wno-psabi",
)  # fmt: skip


class BuildError(Exception):
    """The library cannot be had; the message is one line that says why."""


def open_library(cache_dir: Path | None, *, extra_flags: tuple[str, ...] = ()) -> tuple[ctypes.CDLL, Path | None]:
    """Return the library, compiled now if need be, and where it is kept (None: nowhere).

    ``extra_flags`` go to the compiler last. Raises BuildError.
    """
    compiler = find_compiler()
    flags = (*_FLAGS, *_machine_flags(), *extra_flags)
    name = f"cpu-{_digest(compiler, flags)}.so"
    try:
        folder = (cache_dir or DEFAULT_FOLDER).expanduser() / "kernels"
        path = folder / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        if not _is_own(folder):  # whoever may write there can put another file in the place of ours at any time
            return _compile_for_now(compiler, flags), None
        if _is_own(path):
            with suppress(OSError):  # damaged: compiled again
                return ctypes.CDLL(str(path)), path
        work = tempfile.TemporaryDirectory(dir=folder, prefix="work-")
    except (OSError, RuntimeError):  # not to be written; RuntimeError: a user without a home
        return _compile_for_now(compiler, flags), None
    with work as place:
        built = _compile(compiler, flags, Path(place))
        built.chmod(0o755)
        library = _load(built)  # before the rename: a file that cannot be loaded does not get its name
        try:
            built.replace(path)
        except OSError:
            return library, None
    return library, path


def _compile_for_now(compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    try:
        work = tempfile.TemporaryDirectory()
    except OSError as error:
        raise BuildError(f"no folder to compile in: {' '.join(str(error).split())[:300]}") from None
    with work as place:
        return _load(_compile(compiler, flags, Path(place)))


def _is_own(path: Path) -> bool:
    """Whether it is there, and no other user can have put it there or changed it: it will run in this process."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return not stat.S_ISLNK(found.st_mode) and found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


def find_compiler() -> str:
    """Return the path of the machine's C compiler. Raises BuildError when there is none."""
    if os.name != "posix":
        raise BuildError(f"{platform.system()} is not supported")
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C compiler ({', '.join(_COMPILERS)}) was found")


def _machine_flags() -> tuple[str, ...]:
    # GCC knows -march=native on ARM as well, but leaves out -mcpu's tuning; Clang knows only the latter there.
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join((os.path.realpath(compiler), *flags, platform.machine())).encode())
    with suppress(OSError):
        found = os.stat(os.path.realpath(compiler))
        digest.update(f"{found.st_size} {found.st_mtime_ns}".encode())
    for path in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(path.read_bytes())
    digest.update(_cpu_features())
    return digest.hexdigest()[:16]


def _cpu_features() -> bytes:
    """What tells CPUs apart for a compiler: on Linux the model and features of the first one."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_bytes().split(b"\n\n", 1)[0]
        names = (b"flags", b"Features", b"vendor_id", b"cpu family", b"model", b"CPU implementer", b"CPU part")
        return b"\n".join(line for line in first.splitlines() if line.split(b"\t")[0].strip() in names)
    return platform.processor().encode()


def _compile(compiler: str, flags: tuple[str, ...], place: Path) -> Path:
    target = place / "library.so"
    command = [compiler, *flags, "-o", str(target), str(_SOURCES / "native.c"), "-lm", "-lpthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} failed: {' '.join(str(error).split())[:300]}") from None
    if done.returncode or not target.is_file():
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"{compiler} failed: {lines[0][:300]}")
    return target


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the compiled library cannot be loaded: {' '.join(str(error).split())[:300]}") from None
