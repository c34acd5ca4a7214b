"""The h2 library's connection, made lenient where it gives up a whole connection, and strict where it has no limit.

Lenient: one stream beyond the announced limit (which ``http2`` refuses by itself), a GOAWAY without an error, which
only says that the peer begins no more streams (RFC 9113, 6.8), a malformed request and a lying content-length, which
are errors of their stream alone (8.1.1), and priorities, which are deprecated (5.3.2) and ignored.
Strict: frames are refused by their announced length and not when all of it is in memory, header blocks are bounded
while they arrive, and frames that cause work and carry nothing draw on a ``Calm``. Knows nothing of what is served.
"""

from __future__ import annotations

from collections.abc import Callable

import h2.exceptions
import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event, StreamReset
from h2.settings import SettingCodes, Settings
from hpack import HPACKError
from hypercorn.config import Config
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, PriorityFrame

MOST_HEADER_BLOCK_BYTES = 2**16
_CALM_BURST = 1000
_CALM_PER_S = 100.0
_CALM_MOST = 4000.0
_FRAME_HEADER_BYTES = 9
_CONNECTION_ERRORS = (
    h2.exceptions.StreamClosedError,
    h2.exceptions.StreamIDTooLowError,
    h2.exceptions.TooManyStreamsError,
    h2.exceptions.DenialOfServiceError,
)


class Calm:
    """How many frames that carry nothing (resets, pings, settings, empty data, ...) a peer may still send.

    A burst of 1,000, and 100 a second after that; what the server sends or receives as data earns more, since
    window updates and pings are how a peer paces that.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = float(_CALM_BURST)
        self._seen_at = clock()

    @property
    def is_low(self) -> bool:
        """Whether more has been spent than peers do who behave."""
        self._refill()
        return self._left < 0.9 * _CALM_BURST

    def earn(self, frames: int) -> None:
        """Something useful was sent or received."""
        self._refill()
        self._left = min(self._left + frames, _CALM_MOST)

    def spends(self, frames: int) -> bool:
        """As many frames more. False if that is too many."""
        self._left -= frames
        if self._left < 0:
            self._refill()
        return self._left >= 0

    def _refill(self) -> None:
        """Add what time has brought: never beyond a burst, which only ``earn`` goes beyond."""
        now = self._clock()
        brought = (now - self._seen_at) * _CALM_PER_S
        self._left = max(self._left, min(self._left + brought, _CALM_BURST))
        self._seen_at = now

    def spend(self) -> None:
        """One frame more. Raises DenialOfServiceError if that is too many."""
        if not self.spends(1):
            raise h2.exceptions.DenialOfServiceError("too many frames that carry nothing")


class _Settings(Settings):
    @property
    def max_concurrent_streams(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """No limit inside h2; the one that was announced is kept by the protocol."""
        return 2**31


class LenientConnection(H2Connection):
    """A server's side of a connection. Announces hypercorn's limits, and no WebSockets."""

    MAX_CLOSED_STREAMS = 2**12  # remembered to tell late frames from wrong ones; h2's own 65536 are 6 MB

    def __init__(self, config: Config) -> None:
        super().__init__(H2Configuration(client_side=False, header_encoding=None))
        self.local_settings = _Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: config.h2_max_concurrent_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: config.h2_max_header_list_size,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        # at once, and not when the peer acknowledges the settings, which it may never do
        self.decoder.max_header_list_size = config.h2_max_header_list_size
        self.calm = Calm(trio.current_time)

    def receive_data(self, data: bytes) -> list[Event]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Feed what was read. Raises ProtocolError when the connection is at its end, and has said so to the peer."""
        events = super().receive_data(data)
        try:
            self._check_what_waits()
        except h2.exceptions.ProtocolError as error:
            self._terminate_connection(error.error_code)
            raise
        return events

    def _check_what_waits(self) -> None:
        """Refuse what is still incomplete but already too large: h2 looks only when all of it has arrived."""
        buffer = self.incoming_buffer
        waiting = buffer._data  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        if len(waiting) >= _FRAME_HEADER_BYTES and int.from_bytes(waiting[:3], "big") > self.max_inbound_frame_size:
            raise h2.exceptions.FrameTooLargeError("an overlong frame was announced")
        block = buffer._headers_buffer  # pyright: ignore[reportPrivateUsage]
        if sum(len(frame.data) for frame in block) > MOST_HEADER_BLOCK_BYTES:
            raise h2.exceptions.DenialOfServiceError("a block of headers is too large")

    def _receive_frame(self, frame: Frame) -> list[Event]:
        if not isinstance(frame, HeadersFrame | DataFrame) or (
            isinstance(frame, DataFrame) and not frame.data and "END_STREAM" not in frame.flags
        ):
            self.calm.spend()
        return super()._receive_frame(frame)

    def _receive_headers_frame(self, frame: HeadersFrame) -> tuple[list[Frame], list[Event]]:
        frame.flags.discard("PRIORITY")
        try:
            return super()._receive_headers_frame(frame)
        except _CONNECTION_ERRORS:
            raise
        except h2.exceptions.ProtocolError as error:
            compression_is_lost = isinstance(error.__cause__, HPACKError)
            if compression_is_lost or frame.stream_id not in self.streams:
                raise
            return self._fail_stream(frame.stream_id, error)

    def _receive_data_frame(self, frame: DataFrame) -> tuple[list[Frame], list[Event]]:
        try:
            answer = super()._receive_data_frame(frame)
        except h2.exceptions.InvalidBodyLengthError as error:
            frames, events = self._fail_stream(frame.stream_id, error)
            self.acknowledge_received_data(frame.flow_controlled_length, frame.stream_id)
            return frames, events
        if frame.data:
            self.calm.earn(1)
        return answer

    def _fail_stream(self, stream_id: int, error: h2.exceptions.ProtocolError) -> tuple[list[Frame], list[Event]]:
        self.calm.spend()
        self.reset_stream(stream_id, error.error_code)
        event = StreamReset(stream_id=stream_id, error_code=error.error_code, remote_reset=False)
        return [], [event]

    def _receive_priority_frame(self, frame: HeadersFrame | PriorityFrame) -> tuple[list[Frame], list[Event]]:
        return [], []

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        if frame.error_code != ErrorCodes.NO_ERROR:
            return super()._receive_goaway_frame(frame)
        event = ConnectionTerminated()
        event.error_code = ErrorCodes.NO_ERROR
        event.last_stream_id = frame.last_stream_id
        return [], [event]
