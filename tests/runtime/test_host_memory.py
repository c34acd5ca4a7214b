"""Free memory as /proc and the control groups tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aserve.runtime.host_memory import available_bytes, own_bytes, total_bytes

MEMINFO = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n"
V2 = {"sys/fs/cgroup/memory.current": "300000\n", "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 50000\n"}
V1 = {
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000\n",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 800 * 1024, id="no control group"),
        pytest.param(V2 | {"sys/fs/cgroup/memory.max": "max\n"}, 800 * 1024, id="v2 without limit"),
        pytest.param(V2 | {"sys/fs/cgroup/memory.max": "600000\n"}, 350_000, id="v2"),
        pytest.param(V2 | {"sys/fs/cgroup/memory.max": "200000\n"}, 0, id="v2, over the limit"),
        pytest.param(V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "600000\n"}, 350_000, id="v1"),
        pytest.param(
            V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 800 * 1024, id="v1 no limit"
        ),
    ],
)
def test_available_bytes(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_bytes(tmp_path) == expected


def test_without_proc_and_on_this_machine(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 2**20
    assert available_bytes() > 2**20


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 1000 * 1024, id="no control group"),
        pytest.param(V2 | {"sys/fs/cgroup/memory.max": "max\n"}, 1000 * 1024, id="v2 without limit"),
        pytest.param(V2 | {"sys/fs/cgroup/memory.max": "600000\n"}, 600_000, id="v2"),
        pytest.param(V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "700000\n"}, 700_000, id="v1"),
        pytest.param(
            V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 1000 * 1024, id="v1 no limit"
        ),
    ],
)
def test_total_bytes(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert total_bytes(tmp_path) == expected


def test_own_bytes(tmp_path: Path) -> None:
    assert own_bytes(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("VmRSS:\t 900 kB\nRssAnon:\t 300 kB\n")
    assert own_bytes(tmp_path) == 300 * 1024
    assert total_bytes() >= available_bytes()
