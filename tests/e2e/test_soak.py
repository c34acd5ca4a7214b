"""The soak as a test; about two minutes on two cores."""

from __future__ import annotations

import pytest

from tests.e2e.soak import HTTP1, HTTP2, play


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_ten_thousand_disconnects_leave_nothing() -> None:
    found = play(10_000)
    assert found.problems == []
    assert set(found.ways) == {f"http1 {how}" for how in HTTP1} | {f"http2 {how}" for how in HTTP2}
