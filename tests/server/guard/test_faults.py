"""Each fault of stock hypercorn, played against the guarded server: it behaves, and logs nothing as an error."""

import logging

import pytest
from guard_client import serving
from guard_faults import FAULTS, failure_within_an_answer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_fault(fault, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as running:
        assert await fault(running.port)
        assert await running.quiet()
        assert await running.unconnected()
    errors = [r for r in caplog.records if r.levelno >= logging.WARNING]
    if fault is failure_within_an_answer:  # the application's own failure is one
        assert len(errors) == 1
    else:
        assert not errors
