"""Each fault of stock hypercorn, played against the guarded server: it behaves, and logs nothing as an error."""

import logging
from pathlib import Path

import pytest
from guard_client import serving
from guard_faults import FAULTS, failure_within_an_answer

pytestmark = pytest.mark.anyio


# over TLS, only the writer is another one: by default those that have to do with it, all of them before a release
WRITER = {
    "goaway_cuts_streams",
    "unfinished_answer",
    "no_backpressure",
    "sender_of_a_dead_connection",
    "flood_of_pings",
}
CASES = [pytest.param(fault, False, id=name) for name, fault in FAULTS.items()] + [
    pytest.param(fault, True, id=f"{name}-tls", marks=[] if name in WRITER else [pytest.mark.slow])
    for name, fault in FAULTS.items()
]


@pytest.mark.parametrize(("fault", "tls"), CASES)
async def test_fault(fault, tls: bool, certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    settings = {"certfile": str(certificate[0]), "keyfile": str(certificate[1])} if tls else {}
    async with serving(**settings) as running:
        assert await fault(running.port)
        assert await running.quiet()
        assert await running.unconnected()
    errors = [r for r in caplog.records if r.levelno >= logging.WARNING]
    if fault is failure_within_an_answer:  # the application's own failure is one
        assert len(errors) == 1
    else:
        assert not errors
