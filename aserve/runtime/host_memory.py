"""How much host memory there is, how much of it this process has, and how much it can still take.

Container limits are included. Reads /proc and /sys on Linux; elsewhere half of the physical memory counts as free,
since the standard library cannot say more. Called when the KV cache of a CPU executor is sized.
"""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping or being killed; ``root`` is for tests."""
    candidates = [
        _meminfo(root, "MemAvailable"),
        _cgroup_available(root / "sys/fs/cgroup", v2=True),
        _cgroup_available(root / "sys/fs/cgroup/memory", v2=False),
    ]
    known = [value for value in candidates if value is not None]
    if known:
        return max(0, min(known))
    return _physical_bytes() // 2


def total_bytes(root: Path = Path("/")) -> int:
    """Return the machine's memory, or the container's limit where that is less; ``root`` is for tests."""
    folder = root / "sys/fs/cgroup"
    limits = [_limit(folder, v2=True), _limit(folder / "memory", v2=False)]
    return min([_meminfo(root, "MemTotal") or _physical_bytes(), *(int(x) for x in limits if x.isdigit())])


def own_bytes(root: Path = Path("/")) -> int | None:
    """Return what this process has allocated, files it has mapped aside; None where that cannot be known."""
    return _kib_of("RssAnon", _read(root / "proc/self/status"))


def _meminfo(root: Path, name: str) -> int | None:
    return _kib_of(name, _read(root / "proc/meminfo"))


def _kib_of(name: str, text: str) -> int | None:
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limit(folder: Path, *, v2: bool) -> str:
    return _read(folder / ("memory.max" if v2 else "memory.limit_in_bytes")).strip()


def _cgroup_available(folder: Path, *, v2: bool) -> int | None:
    """Limit minus usage of the group this process sees as its root; None without a limit."""
    limit = _limit(folder, v2=v2)
    usage = _read(folder / ("memory.current" if v2 else "memory.usage_in_bytes")).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None
    reclaimable = 0  # file cache counts as used, but gives way
    key = "inactive_file " if v2 else "total_inactive_file "
    for line in _read(folder / "memory.stat").splitlines():
        if line.startswith(key):
            reclaimable = int(line.split()[1])
    return int(limit) - int(usage) + reclaimable


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
