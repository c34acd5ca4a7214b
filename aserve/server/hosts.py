"""Which Host headers are served: the defence against DNS rebinding.

A web page of evil.example whose name is made to resolve to 127.0.0.1 is, to a browser, of the same origin as a server
there, so no cross-origin rule stops it; but its requests still name evil.example as their host. Knows HTTP only.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

from aserve.core.config import ServerConfig
from aserve.core.errors import HostNotAllowedError
from aserve.server.asgi import RequestHead

_PORT = re.compile(r"(:[0-9]*)?")


class AllowedHosts:
    """The rule of one server.

    Args:
        owns_listener: whether ``server.host`` is what this program listens on; an embedding program listens by itself.
    """

    def __init__(self, server: ServerConfig, *, owns_listener: bool) -> None:
        self._names = frozenset(_name(host) for host in server.allowed_host)
        self._checked = "*" not in self._names and (
            bool(self._names) or (owns_listener and _is_loopback(_name(server.host)))
        )

    def check(self, head: RequestHead) -> None:
        """Raise HostNotAllowedError for a host under which this server is not known. None at all is HTTP/1.0."""
        if not self._checked:
            return
        for value in head.all_headers(b"host"):
            name = _name(value.decode("latin-1"))
            if not (name in self._names or self._matches_a_domain(name) or _is_local(name)):
                raise HostNotAllowedError(
                    "this server is not served under the host name of this request; --allowed-host adds names"
                )

    def _matches_a_domain(self, name: str) -> bool:
        return any(rule.startswith("*.") and name.endswith(rule[1:]) for rule in self._names)


def _is_local(name: str) -> bool:
    """Names that no page of the internet has: loopback, and names without a dot, which nobody can register."""
    return _is_loopback(name) or name.endswith(".localhost") or not ("." in name or ":" in name)


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _name(host: str) -> str:
    """The host in lower case, without its port, brackets and final dot."""
    host = host.strip().lower()
    address, bracket, port = host.partition("]")
    if address.startswith("[") and bracket:
        return address[1:] if _PORT.fullmatch(port) else host  # whatever else follows belongs to the name
    name, _, port = host.rpartition(":")
    return (name if name and ":" not in name and (port.isdigit() or not port) else host).rstrip(".")
