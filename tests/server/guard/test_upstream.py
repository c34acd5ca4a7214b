"""The same faults against stock hypercorn: a test that fails here says that upstream has fixed one.

Then its patch can go, together with its row in ``guard_faults``.
"""

from importlib.metadata import version

import pytest
from guard_faults import FAULTS, goaway_ends_the_process

pytestmark = pytest.mark.anyio


# left to chance in stock hypercorn; `goaway_cuts_streams` goes through the same lines and is certain
CERTAIN = {name: fault for name, fault in FAULTS.items() if fault is not goaway_ends_the_process}


@pytest.mark.parametrize("fault", CERTAIN.values(), ids=CERTAIN)
async def test_upstream_still_has(fault, stock) -> None:
    try:
        assert not await fault(stock.port()), "hypercorn behaves now: this patch may no longer be needed"
    finally:
        stock.end()


def test_the_guard_is_for_this_version() -> None:
    """The guard overrides methods that hypercorn does not promise; read its changes before raising this."""
    assert version("hypercorn").startswith("0.18.")
