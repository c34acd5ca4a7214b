"""The same faults against stock hypercorn: a test that fails here says that upstream has fixed one.

Then its patch can go, together with its row in ``guard_faults``.
"""

import pytest
from guard_faults import FAULTS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_upstream_still_has(fault, stock) -> None:
    try:
        assert not await fault(stock.port()), "hypercorn behaves now: this patch may no longer be needed"
    finally:
        stock.end()
