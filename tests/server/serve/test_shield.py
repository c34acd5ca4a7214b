"""Foreign apps: their cancellations stay out of ``send``."""

import anyio
import anyio.lowlevel
import pytest

from aserve.server.shield import ShieldSend

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"], indirect=True)]


async def never() -> dict:
    await anyio.sleep_forever()
    raise AssertionError


@pytest.mark.parametrize("shielded", [True, False])
async def test_send_does_its_bookkeeping(shielded: bool) -> None:
    """An app that is cancelled by what its own send causes, as QuartTrio is at the end of every answer."""
    kept: list[str] = []

    async def app(scope, receive, send) -> None:
        with anyio.CancelScope() as scope["cancel"]:
            await send({"type": "http.response.body"})
            await anyio.lowlevel.checkpoint()
            kept.append("went on")

    scope: dict = {}

    async def send(message) -> None:
        scope["cancel"].cancel()
        await anyio.sleep(0.01)
        kept.append("bookkeeping")

    await (ShieldSend(app) if shielded else app)(scope, never, send)
    assert kept == (["bookkeeping"] if shielded else [])


async def test_shield_has_a_limit() -> None:
    """A peer that takes nothing holds a cancelled app for the limit, and no longer."""

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.body"})
        await anyio.sleep_forever()

    async def send(message) -> None:
        await anyio.sleep_forever()

    with anyio.move_on_after(0.05) as scope:
        await ShieldSend(app, limit_s=0.2)({}, never, send)
    assert scope.cancelled_caught
