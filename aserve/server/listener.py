"""The listening socket, bound before anything slow starts, and what is wrong when it cannot be bound.

Bound here and not by hypercorn because of one option: TCP_USER_TIMEOUT, which accepted sockets inherit, lets the kernel
drop a peer that acknowledges nothing any more. Called by ``serve``.
"""

from __future__ import annotations

import errno
import os
import socket

from aserve.core.errors import ConfigError

_BACKLOG = 1024
_REASONS = {
    errno.EADDRINUSE: "the port is in use; stop the program that has it, or choose another --port",
    errno.EADDRNOTAVAIL: "this machine does not have that address; 0.0.0.0 listens on all of its addresses",
    errno.EACCES: "not permitted; ports below 1024 need privileges",
}


def bind(host: str, port: int, *, user_timeout_s: float) -> socket.socket:
    """Return a listening TCP socket, IPv4 or IPv6 by ``host``; port 0 takes a free one, ``::`` takes both families.

    Args:
        user_timeout_s: how long sent data may stay unacknowledged before the kernel drops a connection.

    Raises:
        ConfigError: one line that names host and port and what to do.
    """
    name = host.removeprefix("[").removesuffix("]")
    where = f"cannot listen on {address(name, port)}"
    if not 0 <= port <= 65535:
        raise ConfigError(f"{where}: a port lies between 0 and 65535")
    try:
        found = socket.getaddrinfo(name or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{where}: the host name cannot be resolved ({error})") from error
    # a name like localhost has both kinds of addresses; most clients try, and most users mean, the IPv4 one
    family, kind, protocol, _, target = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(name != "::"))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_s * 1000))
        sock.bind(target)
        sock.listen(_BACKLOG)  # here, because of two servers that bind at once it is listen that refuses the second
    except OSError as error:
        sock.close()
        reason = _REASONS.get(error.errno or 0) or os.strerror(error.errno or 0)
        raise ConfigError(f"{where}: {reason}") from error
    sock.setblocking(False)
    return sock


def address(host: str, port: int) -> str:
    """``host:port``, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url(sock: socket.socket, *, tls: bool) -> str:
    """The URL under which a listening socket is reached, with its real port."""
    host, port = sock.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{address(host, port)}"
