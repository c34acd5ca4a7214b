"""How much host memory this process can still take, container limits included.

Reads /proc and /sys on Linux; elsewhere half of the physical memory counts as free, since the standard library cannot
say more. Called once, when the KV cache of a CPU executor is sized.
"""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping or being killed; ``root`` is for tests."""
    candidates = [
        _meminfo_available(root),
        _cgroup_available(root / "sys/fs/cgroup", v2=True),
        _cgroup_available(root / "sys/fs/cgroup/memory", v2=False),
    ]
    known = [value for value in candidates if value is not None]
    if known:
        return max(0, min(known))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _meminfo_available(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available(folder: Path, *, v2: bool) -> int | None:
    """Limit minus usage of the group this process sees as its root; None without a limit."""
    limit = _read(folder / ("memory.max" if v2 else "memory.limit_in_bytes")).strip()
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
