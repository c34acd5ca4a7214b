"""Hypercorn's settings with the guard's own added, and the values that aserve runs with.

The guard is written against hypercorn 0.18; ``tests/server/guard/test_upstream.py`` runs each fault against the stock
classes and says when a patch is no longer needed. Knows nothing of aserve but ``ServerConfig``.
"""

from __future__ import annotations

import logging

from hypercorn.config import Config

from aserve.core.config import ServerConfig

MOST_HEADERS = 128
MOST_HEADER_BYTES = 2**15


class GuardConfig(Config):
    """Hypercorn's ``Config`` plus three time limits, in seconds, and limits on numbers.

    Attributes:
        header_timeout: From the first byte of a request (or from the connection's start) to the end of its headers.
        stall_timeout: A peer that takes no byte of what waits for it for this long is dropped.
        linger_timeout: After an early answer, how long what the peer still sends is read and thrown away, so that
            the answer is not lost to a TCP reset (RFC 9112, 9.6).
        max_connections: Beyond it the longest idle connection is closed for a new one, or new ones are not accepted.
        max_headers: Of one request.
        client_ca: PEM file with the authorities whose clients are served, over TLS only.
    """

    header_timeout: float = 30.0
    stall_timeout: float = 30.0
    linger_timeout: float = 2.0
    max_connections: int = 4096
    max_headers: int = MOST_HEADERS
    client_ca: str | None = None
    h11_max_incomplete_size = MOST_HEADER_BYTES
    h2_max_header_list_size = MOST_HEADER_BYTES + 32 * MOST_HEADERS  # each counts 32 more (RFC 9113, 6.5.2)

    @classmethod
    def from_server(cls, server: ServerConfig) -> GuardConfig:
        """The settings of a server. The reasons for each value are measured faults of other values, named here."""
        config = cls()
        config.header_timeout = server.read_timeout_s
        config.stall_timeout = server.stall_timeout_s
        config.keep_alive_timeout = 30
        config.keep_alive_max_requests = 10**9  # at the limit hypercorn sends GOAWAY and live streams get no byte more
        config.read_timeout = None  # it would also cut answers that are being streamed
        config.ssl_handshake_timeout = 10
        config.max_connections = server.max_connections
        config.h2_max_concurrent_streams = server.max_streams
        config.include_server_header = False
        config.accesslog = None
        config.errorlog = logging.getLogger("aserve.server.http")
        config.certfile = server.tls_certificate
        config.keyfile = server.tls_key
        config.client_ca = server.tls_client_ca
        return config
