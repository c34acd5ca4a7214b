"""HTTP/2 on one connection: hypercorn's ``H2Protocol`` with a sender that batches, and stream faults that stay small.

Patches, each with a test that fails without it: DATA after an early answer, odd or missing pseudo-headers and one
stream too many end at most that stream; the peer's GOAWAY lets its streams finish (RFC 9113, 6.8) instead of cutting
them; an unfinished answer is reset with INTERNAL_ERROR; a stream whose peer opens no window blocks its sender and is
reset after the stall timeout. The priority tree (deprecated in RFC 9113, and a source of exceptions) is not used:
streams with something to send take turns by the frame, and one round is one write.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h2.events
import h2.exceptions
import trio
from h2.errors import ErrorCodes
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState
from hypercorn.utils import filter_pseudo_headers
from hyperframe.frame import GoAwayFrame

from aserve.server.guard.config import GuardConfig
from aserve.server.guard.ending import Ending
from aserve.server.guard.lenient_h2 import LenientConnection
from aserve.server.guard.send_buffer import SendBuffer
from aserve.server.guard.stream import GuardedStream, LastWords, StreamAborted, error_body

_ROUND_BYTES = 2**16
_MOST_REPLY_BYTES = 2**18
_CONNECTION_WINDOW_BYTES = 2**20
_EARLY_ANSWER_BYTES = 2**20
_RAPID_RESET_FRAMES = 5  # what such a stream costs in calm, beside its reset: h2 has made and ended it
_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


class GuardedHTTP2(H2Protocol):
    """See the module.

    Args:
        args: As hypercorn's ``H2Protocol``.
        apps: Where apps run.
        drain: Waits until the peer has taken what was written.
        call_at: Asks for a call of ``check`` at a time (trio's clock).
        ending: Whether the server is winding down.
    """

    config: GuardConfig
    streams: dict[int, GuardedStream]  # pyright: ignore[reportIncompatibleVariableOverride]
    in_headers = False  # frames while idle do not prolong the idle time: there is no telling what they begin

    def __init__(
        self,
        *args: Any,
        apps: trio.Nursery,
        drain: Callable[..., Awaitable[None]],
        call_at: Callable[[float], None],
        ending: Ending,
    ) -> None:
        super().__init__(*args)
        self._ending = ending
        self._has_served = False
        self.connection = LenientConnection(self.config)
        self.linger = False
        self._apps = apps
        self._drain = drain
        self._call_at = call_at
        self._buffers: dict[int, SendBuffer] = {}
        self._ready: dict[int, None] = {}  # ordered set of streams that may have something to send
        self._wake = trio.Event()
        self._early: dict[int, int] = {}  # answered before the request was complete: bytes still accepted
        self._num_apps = 0  # more than streams where a stream has ended and its app has not
        self._peer_leaves = False
        self._leaving = False

    # ---- the connection's side

    async def initiate(self, headers: object = None, settings: object = None) -> None:
        """Say hello, and start the sender."""
        self.connection.initiate_connection()
        self.connection.increment_flow_control_window(_CONNECTION_WINDOW_BYTES)
        await self._flush()
        self.task_group.spawn(self.send_task)  # pyright: ignore[reportUnknownMemberType]
        await self.send(Updated(idle=True))

    @property
    def is_noisy(self) -> bool:
        """Whether the peer sends much that carries nothing."""
        return self.connection.calm.is_low

    async def ready_to_read(self) -> None:
        """Wait while a flood of replies to control frames is not being read; all else has its flow control."""
        await self._drain(_MOST_REPLY_BYTES)

    async def expire(self) -> None:
        """The time for the next request is over."""
        await self._goaway()

    async def begin_drain(self) -> None:
        """Take no new streams; leave when the running ones are done.

        GOAWAY goes out only then: h2 and httpcore as clients give up their running streams when they receive one.
        """
        await self._flush()

    async def wind_down(self) -> None:
        """Leave as soon as no stream runs, at once if none does; until then new ones are still answered."""
        await self._flush()

    async def _goaway(self) -> None:
        frame = GoAwayFrame(0, last_stream_id=self.connection.highest_inbound_stream_id)
        await self.send(RawData(data=frame.serialize()))

    async def check(self, now: float, stall_timeout: float) -> None:
        """Reset the streams whose peer has opened no window for ``stall_timeout`` seconds."""
        for stream_id, buffer in list(self._buffers.items()):
            if len(buffer) == 0:
                continue
            if buffer.moved_at + stall_timeout <= now:
                self._reset(stream_id, ErrorCodes.CANCEL)
                await self._end(stream_id)
            else:
                self._call_at(buffer.moved_at + stall_timeout)
        await self._flush()

    async def handle(self, event: Any) -> None:
        """Feed what was read; an empty read, as ``Closed``, is the end of all streams."""
        if isinstance(event, RawData) and event.data:
            try:
                events = self.connection.receive_data(event.data)
            except h2.exceptions.ProtocolError:
                self.linger = True
                await self._flush()
                await self.send(Closed())
            else:
                await self._handle_events(events)
        else:
            self.closed = True
            for stream_id in {*self.streams, *self._buffers}:
                await self._end(stream_id)
            self._wake.set()

    # ---- what the peer does

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        reset = {event.stream_id for event in events if isinstance(event, h2.events.StreamReset)}
        for event in events:
            if isinstance(event, h2.events.RequestReceived):
                if event.stream_id not in reset:
                    await self._open(event)
                elif not self.connection.calm.spends(_RAPID_RESET_FRAMES):
                    await self._calm_down()  # opened and reset in one read (CVE-2023-44487): no app is started for it
                    return
            elif isinstance(event, h2.events.DataReceived):
                await self._receive_body(event)
            elif isinstance(event, h2.events.StreamEnded):
                self._early.pop(event.stream_id, None)
                if event.stream_id in self.streams:
                    await self.streams[event.stream_id].handle(EndBody(stream_id=event.stream_id))
            elif isinstance(event, h2.events.StreamReset):
                self._early.pop(event.stream_id, None)
                await self._end(event.stream_id)
            elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
                self._unblock(event.stream_id if isinstance(event, h2.events.WindowUpdated) else 0)
            elif isinstance(event, h2.events.ConnectionTerminated):
                self._peer_leaves = True
                if event.error_code != ErrorCodes.NO_ERROR:
                    await self.send(Closed())
        await self._flush()

    async def _calm_down(self) -> None:
        self.linger = True
        self.connection.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
        await self._flush()
        await self.send(Closed())

    async def _receive_body(self, event: h2.events.DataReceived) -> None:
        stream = self.streams.get(event.stream_id)
        padding = event.flow_controlled_length - len(event.data)
        if stream is not None and not stream.closed:
            self._acknowledge(event.stream_id, padding)
            await stream.handle(Body(stream_id=event.stream_id, data=event.data))
            return
        self._acknowledge(event.stream_id, event.flow_controlled_length)
        left = self._early.get(event.stream_id)
        if left is not None:  # answered already; let a client that reads only after sending all have its answer
            self._early[event.stream_id] = left - len(event.data)
            if left < len(event.data):
                del self._early[event.stream_id]
                self._reset(event.stream_id, ErrorCodes.NO_ERROR)

    def _acknowledge(self, stream_id: int, size: int) -> None:
        if size > 0 and not self.closed:
            self.connection.acknowledge_received_data(size, stream_id)

    async def _open(self, event: h2.events.RequestReceived) -> None:
        self._has_served = True
        stream_id, pseudo = event.stream_id, dict(h for h in event.headers if h[0].startswith(b":"))
        method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
        if self.context.terminated.is_set() or self._live() >= self.config.h2_max_concurrent_streams:
            self._reset(stream_id, ErrorCodes.REFUSED_STREAM)
        elif len(event.headers) > self.config.max_headers:
            message = f"The request has more than {self.config.max_headers} headers."
            self._answer(event, 431, "headers_too_large", message)
        elif method == b"CONNECT":
            self._answer(event, 405, "method_not_allowed", "CONNECT is not supported.")
        elif not method or not _TOKEN.issuperset(method):
            self._answer(event, 400, "malformed_request", "The request's :method is not a token.")
        elif not path.isascii() or not path.startswith((b"/", b"*")):
            self._answer(event, 400, "malformed_request", "The request's :path must be ASCII and start with /.")
        else:
            await self._start(event, method.decode("ascii").upper(), path)

    def _live(self) -> int:
        return max(len(self.streams), self._num_apps) + len(self._early)

    def _count_app(self, change: int) -> None:
        self._num_apps += change

    async def _start(self, event: h2.events.RequestReceived, method: str, path: bytes) -> None:
        stream_id = event.stream_id

        def on_read(size: int) -> None:
            self._acknowledge(stream_id, size)
            self._wake.set()  # the sender flushes

        expects_continue = any(n == b"expect" and v.lower() == b"100-continue" for n, v in event.headers)

        async def on_wait() -> None:
            nonlocal expects_continue
            if expects_continue:
                expects_continue = False
                await self._send_continue(stream_id)

        self.streams[stream_id] = GuardedStream(
            self, stream_id, apps=self._apps, on_read=on_read, on_wait=on_wait, on_app=self._count_app
        )
        self._buffers[stream_id] = SendBuffer()
        await self.send(Updated(idle=False))
        await self.streams[stream_id].handle(
            Request(
                stream_id=stream_id,
                headers=filter_pseudo_headers(event.headers),
                http_version="2",
                method=method,
                raw_path=path,
                state=self.connection_state,
            )
        )

    def _answer(self, event: h2.events.RequestReceived, status: int, code: str, message: str) -> None:
        headers, body = error_body(status, code, message)
        headers = [(b":status", b"%d" % status), *headers, *self.config.response_headers("h2")]
        self.connection.send_headers(event.stream_id, headers)
        if self.connection.local_flow_control_window(event.stream_id) >= len(body):
            self.connection.send_data(event.stream_id, body, end_stream=True)
        else:
            self._reset(event.stream_id, ErrorCodes.CANCEL)
        if event.stream_ended is None:
            self._early[event.stream_id] = _EARLY_ANSWER_BYTES

    # ---- what the apps say

    async def stream_send(self, event: Event) -> None:
        """Take what a stream's app says. State changes first, waiting (cancellable, losing nothing) last."""
        stream_id = event.stream_id
        buffer = self._buffers.get(stream_id)
        if isinstance(event, StreamClosed | StreamAborted):
            await self._finish(stream_id, aborted=isinstance(event, StreamAborted))
        elif buffer is None or buffer.closed:
            return
        elif isinstance(event, Response):
            await self._send_headers(event)
        elif isinstance(event, Body):
            buffer.push(event.data)
            self._unblock(stream_id)
            if not isinstance(event, LastWords):
                await buffer.room()
        elif isinstance(event, EndBody):
            buffer.complete = True
            self._unblock(stream_id)
            await buffer.flushed()

    async def _send_headers(self, event: Response) -> None:
        headers = [(b":status", b"%d" % event.status_code), *event.headers, *self.config.response_headers("h2")]
        try:
            self.connection.send_headers(event.stream_id, headers)
        except h2.exceptions.ProtocolError:  # the stream or the connection is closed
            await self._end(event.stream_id)
        await self._flush()

    async def _send_continue(self, stream_id: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None and stream.state is ASGIHTTPState.REQUEST and not stream.request_ended:
            with suppress(h2.exceptions.ProtocolError):  # the connection is at its end
                self.connection.send_headers(stream_id, [(b":status", b"100")])
            await self._flush()

    async def _finish(self, stream_id: int, *, aborted: bool) -> None:
        stream, buffer = self.streams.get(stream_id), self._buffers.get(stream_id)
        if aborted and stream is not None:
            self._reset(stream_id, ErrorCodes.INTERNAL_ERROR)
            await self._end(stream_id)
        elif stream is not None and (buffer is None or buffer.closed):
            await self._end(stream_id)
        await self._flush()

    async def _end(self, stream_id: int) -> None:
        """Forget a stream, whatever ended it, and tell its app."""
        buffer, stream = self._buffers.pop(stream_id, None), self.streams.pop(stream_id, None)
        self._ready.pop(stream_id, None)
        if buffer is not None:
            buffer.close()
        if stream is not None:
            await stream.handle(StreamClosed(stream_id=stream_id))
            await self.send(Updated(idle=not self.streams))

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        with suppress(h2.exceptions.ProtocolError):  # it may be closed already
            self.connection.reset_stream(stream_id, code)

    # ---- the sender

    def _unblock(self, stream_id: int | None) -> None:
        for each in (stream_id,) if stream_id else self._buffers:
            self._ready[each] = None
        self._wake.set()

    async def send_task(self) -> None:
        """Send what the streams have, in turns, one write per round."""
        while not self.closed:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._ready and not self.closed:
                await self._send_round()
                await self._flush()
                await self._drain()
            await self._flush()

    async def _send_round(self) -> None:
        room = _ROUND_BYTES
        for stream_id in list(self._ready):
            if room <= 0:
                return
            self._ready.pop(stream_id, None)
            buffer = self._buffers.get(stream_id)
            if buffer is not None:
                try:
                    room -= self._send_frame(stream_id, buffer)
                except (h2.exceptions.ProtocolError, KeyError):  # closed in the meantime
                    await self._end(stream_id)
                if buffer.closed and stream_id in self.streams:
                    await self._sent_all(stream_id)

    def _send_frame(self, stream_id: int, buffer: SendBuffer) -> int:
        if len(buffer) == 0 and not buffer.complete:
            return 0
        window = self.connection.local_flow_control_window(stream_id)
        data = buffer.pop(max(0, min(window, self.connection.max_outbound_frame_size)))
        last = buffer.complete and len(buffer) == 0
        if data or last:
            self.connection.send_data(stream_id, data, end_stream=last)
            self.connection.calm.earn(2)  # a window update for the stream, one for the connection
        if last:
            buffer.close()
        elif len(buffer) and window > len(data):
            self._ready[stream_id] = None
        elif len(buffer):
            self._call_at(buffer.moved_at + self.config.stall_timeout)
        return len(data)

    async def _sent_all(self, stream_id: int) -> None:
        """The answer is complete on the wire."""
        if not self.streams[stream_id].request_ended:
            self._early[stream_id] = _EARLY_ANSWER_BYTES
        await self._end(stream_id)

    async def _flush(self) -> None:
        """Hand what h2 has produced to the outbox, which takes it without waiting; leave after the last stream."""
        data = self.connection.data_to_send()
        if data:
            await self.send(RawData(data=data))
        if self._leaving or self.streams:
            return
        if self._peer_leaves or self.context.terminated.is_set() or (self._ending.winding and self._has_served):
            self._leaving = True
            await self._goaway()
            await self.send(Closed())
