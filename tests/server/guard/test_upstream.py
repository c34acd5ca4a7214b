"""The same faults against stock hypercorn: a test that fails here says that upstream has fixed one.

Then its patch can go, together with its row in ``guard_faults``.
"""

import inspect
import re
from importlib.metadata import version

import pytest
import trio
from guard_client import H2Peer, Peer, ask, serving
from guard_faults import FAULTS, goaway_ends_the_process
from h2.config import H2Configuration
from h2.connection import H2Connection
from hypercorn.config import Config

from aserve.server.guard.lenient_h2 import LenientConnection

pytestmark = pytest.mark.anyio


# left to chance in stock hypercorn; `goaway_cuts_streams` goes through the same lines and is certain
CERTAIN = {name: fault for name, fault in FAULTS.items() if fault is not goaway_ends_the_process}


@pytest.mark.parametrize("fault", CERTAIN.values(), ids=CERTAIN)
async def test_upstream_still_has(fault, stock) -> None:
    try:
        assert not await fault(stock.port()), "hypercorn behaves now: this patch may no longer be needed"
    finally:
        stock.end()


# What a setting of hypercorn does; ``GuardConfig.from_server`` has the values that avoid it.


async def _streams_end(port: int) -> bool:
    peer = await H2Peer.connect(port)
    streams = [peer.begin("/raw?n=40&ms=20") for _ in range(3)]
    await peer.flush()
    return await peer.over(*streams, seconds=4) and all(peer.streams[s].ended for s in streams)


@pytest.mark.parametrize(
    "settings",
    [{"keep_alive_max_requests": 2}, {"read_timeout": 0.3}],
    ids=["max requests", "read timeout"],
)
async def test_settings_that_cut_streams(settings, stock) -> None:
    try:
        assert not await _streams_end(stock.port(**settings)), "hypercorn lets streams finish now"
    finally:
        stock.end()
    async with serving(**settings) as running:
        assert await _streams_end(running.port)


async def test_stop_with_a_client_that_does_not_read(stock) -> None:
    """Ours: ``test_connection.test_stop_with_a_client_that_does_not_read``."""
    try:
        peer = await Peer.connect(stock.port(), receive_buffer=4096)
        await peer.get("/stuck?kib=65536")
        await trio.sleep(0.5)
        assert not stock.terminate(4), "hypercorn ends in spite of a client that does not read"
    finally:
        stock.end()


async def test_engine_in_the_lifespan_dies_unnoticed(stock) -> None:
    """Ours is not in the lifespan; ``tests/server/serve`` has its death end the process."""
    try:
        port = stock.port(engine=True)
        await trio.sleep(1)
        assert await ask(port) == b"ok", "hypercorn ends when its lifespan fails"
    finally:
        stock.end()


async def test_quart_cuts_answers_after_its_timeout() -> None:
    """Quart's RESPONSE_TIMEOUT, 60 s, is on the whole answer; our small routes set it to None."""
    from quart_trio import QuartTrio

    app = QuartTrio("slow")

    @app.route("/slow")
    async def slow() -> object:
        async def pieces() -> object:
            for _ in range(30):
                yield b"piece"
                await trio.sleep(0.02)

        return pieces()

    for limit, whole in ((0.2, False), (None, True)):
        app.config["RESPONSE_TIMEOUT"] = limit
        async with serving(app) as running:
            peer = await Peer.connect(running.port)
            await peer.get("/slow")
            assert await peer.until(b"0\r\n\r\n", 3) is whole


def test_the_guard_is_for_this_version() -> None:
    """The guard overrides methods that hypercorn does not promise; read its changes before raising this."""
    assert version("hypercorn").startswith("0.18.")


async def test_h2_has_what_the_guard_overrides_and_reads() -> None:
    """Private names, most of them: an override of one that h2 no longer calls would be silently without effect."""
    h2, ours = H2Connection(H2Configuration(client_side=False)), {"calm", "_check_what_waits", "_fail_stream"}
    source = inspect.getsource(LenientConnection)
    overridden = {name for name in vars(LenientConnection) if not name.startswith("__")} - ours
    read = set(re.findall(r"\bself\.(\w+)", source)) - ours
    assert "_receive_frame" in overridden and "_terminate_connection" in read
    assert not [name for name in overridden | read if not hasattr(h2, name)]
    calls = inspect.getsource(H2Connection)
    assert not [name for name in overridden if not re.search(rf"\bself\.{name}\b", calls) and name != "receive_data"]
    of_the_buffer = set(re.findall(r"\bbuffer\.(\w+)", source))
    assert "_data" in of_the_buffer
    assert not [name for name in of_the_buffer if not hasattr(h2.incoming_buffer, name)]
    LenientConnection(Config()).receive_data(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
