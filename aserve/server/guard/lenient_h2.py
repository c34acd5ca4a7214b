"""The h2 library's connection, made to take two things calmly for which it gives up the whole connection.

One stream beyond the announced limit, which ``http2`` refuses by itself, and a GOAWAY without an error, which only says
that the peer begins no more streams (RFC 9113, 6.8). Knows nothing of what is served.
"""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event
from h2.settings import SettingCodes, Settings
from hypercorn.config import Config
from hyperframe.frame import Frame, GoAwayFrame


class _Settings(Settings):
    @property
    def max_concurrent_streams(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """No limit inside h2; the one that was announced is kept by the protocol."""
        return 2**31


class LenientConnection(H2Connection):
    """A server's side of a connection. Announces hypercorn's limits, and no WebSockets."""

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

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        if frame.error_code != ErrorCodes.NO_ERROR:
            return super()._receive_goaway_frame(frame)
        event = ConnectionTerminated()
        event.error_code = ErrorCodes.NO_ERROR
        event.last_stream_id = frame.last_stream_id
        return [], [event]
