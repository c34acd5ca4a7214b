"""Each fault of stock hypercorn, played against the guarded server: it behaves, and logs nothing as an error."""

import logging
from pathlib import Path

import pytest
from guard_client import serving
from guard_faults import FAULTS, failure_within_an_answer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
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
