"""Clients at byte level, and a guarded server in this process."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import trio
from guard_app import App

from aserve.server.guard import GuardConfig, GuardedServer
from aserve.server.listener import bind

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass
class Running:
    port: int
    server: GuardedServer
    app: App
    ended: trio.Event

    async def quiet(self, seconds: float = 5) -> bool:
        """Whether all handlers end within this time."""
        with trio.move_on_after(seconds):
            while self.app.running:
                await trio.sleep(0.01)
        return self.app.running == 0

    async def app_sees(self, what: Callable[[App], bool], seconds: float = 5) -> bool:
        """Whether something holds of the app within this time."""
        with trio.move_on_after(seconds):
            while not what(self.app):
                await trio.sleep(0.01)
        return what(self.app)

    async def unconnected(self, seconds: float = 5) -> bool:
        """Whether all connections end within this time."""
        with trio.move_on_after(seconds):
            while self.server.num_connections:
                await trio.sleep(0.01)
        return self.server.num_connections == 0


@asynccontextmanager
async def serving(app: Any = None, *, tls: ssl.SSLContext | None = None, **settings: Any) -> AsyncIterator[Running]:
    config = GuardConfig()
    config.accesslog = config.errorlog = None
    config.keep_alive_timeout = 0.4
    config.h2_max_concurrent_streams = 32
    config.linger_timeout = 0.3
    for name, value in settings.items():
        setattr(config, name, value)
    sock = bind("127.0.0.1", 0, user_timeout_s=config.stall_timeout)
    app = app or App()
    ended = trio.Event()
    async with trio.open_nursery() as nursery:
        server = GuardedServer(app, config, sock)

        async def run(task_status: Any) -> None:
            await server.run(task_status=task_status)
            ended.set()

        await nursery.start(run)
        port = sock.getsockname()[1]
        if config.certfile is not None:
            Peer.tls[port] = tls or client_tls(config.certfile)
        yield Running(port, server, app, ended)
        Peer.tls.pop(port, None)
        nursery.cancel_scope.cancel()


def client_tls(certificate: str | Path, *alpn: str) -> ssl.SSLContext:
    """Trusts one certificate, whatever its name."""
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def make_certificate(folder: Path, name: str = "cert", *more: str) -> tuple[Path, Path]:
    """A self-signed certificate and its key, made by OpenSSL."""
    files = folder / f"{name}.pem", folder / f"{name}-key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj"
    target = [f"/CN={name}", "-out", str(files[0]), "-keyout", str(files[1]), *more]
    subprocess.run([*command.split(), *target], check=True, capture_output=True)
    return files


class Peer:
    """A TCP connection; reads everything into ``data``. Those left open are closed after the test.

    To a port in ``tls`` it speaks TLS.
    """

    all: ClassVar[list[Peer]] = []
    tls: ClassVar[dict[int, ssl.SSLContext]] = {}
    alpn: ClassVar[str] = "http/1.1"

    def __init__(self, stream: Any, plain: trio.SocketStream | None = None) -> None:
        self.stream = stream
        self.plain: trio.SocketStream = plain or stream
        self.data = bytearray()
        self.gone = False

    @classmethod
    async def connect(cls, port: int, *, receive_buffer: int | None = None) -> Any:
        sock = trio.socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await sock.connect(("127.0.0.1", port))
        except OSError:
            sock.close()
            raise
        plain = trio.SocketStream(sock)
        stream: Any = plain
        if port in cls.tls:
            cls.tls[port].set_alpn_protocols([cls.alpn])
            stream = trio.SSLStream(plain, cls.tls[port], server_hostname="x", https_compatible=True)
        peer = cls(stream, plain)
        cls.all.append(peer)
        try:
            if stream is not plain:
                await stream.do_handshake()
            await peer.start()
        except trio.BrokenResourceError:
            plain.socket.close()
            raise ConnectionResetError from None
        return peer

    async def start(self) -> None:
        pass

    async def send(self, data: bytes) -> None:
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone = True

    async def get(self, path: str, *headers: str, method: str = "GET") -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def pump(self, until: Callable[[], bool], seconds: float = 5) -> bool:
        """Read until something holds; whether it does."""
        with trio.move_on_after(seconds):
            while not until() and not self.gone:
                await self._read()
        return until()

    async def _read(self) -> None:
        try:
            data = await self.stream.receive_some(65536)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        self.gone = not data
        self.receive(data)

    def receive(self, data: bytes) -> None:
        self.data += data

    async def until(self, part: bytes, seconds: float = 5) -> bool:
        return await self.pump(lambda: part in self.data, seconds)

    async def closed(self, seconds: float = 5) -> bool:
        """Whether the server ends the connection within this time."""
        return await self.pump(lambda: self.gone, seconds)

    @property
    def status(self) -> int | None:
        return int(self.data.split()[1]) if self.data.startswith(b"HTTP/1.1 ") else None

    async def finish(self) -> None:
        await self.stream.aclose()

    async def reset(self) -> None:
        """Close with a TCP reset."""
        self.plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # type: ignore[arg-type]
        await self.plain.aclose()


@dataclass
class H2Stream:
    status: int | None = None
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    continued: bool = False
    reset: int | None = None

    @property
    def over(self) -> bool:
        return self.ended or self.reset is not None


class H2Peer(Peer):
    """An HTTP/2 connection with prior knowledge. ``window`` None: never opens more than the initial window."""

    alpn = "h2"
    window_updates = True
    initial_window: int | None = None

    async def start(self) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        if self.initial_window is not None:
            self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: self.initial_window})
        self.streams: dict[int, H2Stream] = {}
        self.goaway = False
        self.goaway_code: int | None = None
        self.goaway_last = 0
        await self.flush()

    async def flush(self) -> None:
        data = self.h2.data_to_send()
        if data:
            await self.send(data)

    def begin(
        self, path: str, *, method: str = "GET", end: bool = True, headers: Sequence[tuple[str, str]] = ()
    ) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x")]
        self.h2.send_headers(stream_id, [*pseudo, *headers], end_stream=end)
        self.streams[stream_id] = H2Stream()
        return stream_id

    async def request(self, path: str, *, method: str = "GET", end: bool = True) -> int:
        stream_id = self.begin(path, method=method, end=end)
        await self.flush()
        return stream_id

    async def cancel(self, *stream_ids: int) -> None:
        for stream_id in stream_ids:
            self.h2.reset_stream(stream_id, 8)
        await self.flush()

    async def over(self, *stream_ids: int, seconds: float = 5) -> bool:
        return await self.pump(lambda: all(self.streams[s].over for s in stream_ids), seconds)

    async def _read(self) -> None:
        await super()._read()
        await self.flush()

    def receive(self, data: bytes) -> None:
        super().receive(data)
        for event in self.h2.receive_data(data):
            stream = self.streams.get(getattr(event, "stream_id", None) or 0, H2Stream())
            if isinstance(event, h2.events.ResponseReceived):
                stream.status = int(dict(event.headers)[":status"])
            elif isinstance(event, h2.events.InformationalResponseReceived):
                stream.continued = True
            elif isinstance(event, h2.events.DataReceived):
                stream.data += event.data
                if self.window_updates:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                stream.ended = True
            elif isinstance(event, h2.events.StreamReset):
                stream.reset = event.error_code
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.goaway = True
                self.goaway_code = event.error_code
                self.goaway_last = event.last_stream_id or 0


@dataclass(frozen=True)
class Frame:
    """A frame as it came."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> int:
        """Of RST_STREAM or GOAWAY."""
        return int.from_bytes(self.payload[-4:] if self.kind == RST_STREAM else self.payload[4:8], "big")


DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
HELLO = PREFACE + b"\0\0\0\x04\0\0\0\0\0"


class RawH2Peer(Peer):
    """Says what it is told to, in HTTP/2 or nearly; ``frames`` are the server's."""

    alpn = "h2"

    @property
    def frames(self) -> list[Frame]:
        found, rest = [], bytes(self.data)
        while len(rest) >= 9 and len(rest) >= 9 + int.from_bytes(rest[:3], "big"):
            size = int.from_bytes(rest[:3], "big")
            stream_id = int.from_bytes(rest[5:9], "big") & 0x7FFFFFFF
            found.append(Frame(rest[3], rest[4], stream_id, rest[9 : 9 + size]))
            rest = rest[9 + size :]
        return found

    def of(self, kind: int) -> list[Frame]:
        return [frame for frame in self.frames if frame.kind == kind]

    @property
    def goaway_code(self) -> int | None:
        return next((frame.code for frame in self.of(GOAWAY)), None)


class Narrow(H2Peer):
    """Opens no flow-control window at all."""

    window_updates = False
    initial_window = 0


async def ask(port: int, path: str = "/ok", *headers: str) -> bytes | None:
    """The body of one HTTP/1.1 answer; None if there is no server."""
    try:
        peer = await Peer.connect(port)
    except OSError:
        return None
    await peer.get(path, "Connection: close", *headers)
    await peer.closed()
    await peer.finish()
    return bytes(peer.data.partition(b"\r\n\r\n")[2]) if peer.status == 200 else None


async def count(port: int) -> dict[str, int]:
    body = await ask(port, "/count")
    return json.loads(body) if body else {"running": -1, "sent": -1, "told": -1}


async def settles(port: int, seconds: float = 5) -> bool:
    """Whether the server's handlers all end within this time."""
    with trio.move_on_after(seconds):
        while (await count(port))["running"] != 0:
            await trio.sleep(0.05)
        return True
    return False
