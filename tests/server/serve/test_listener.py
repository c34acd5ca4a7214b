"""The listening socket, and the one line that says why there is none."""

import socket

import pytest

from aserve.core.errors import ConfigError
from aserve.server import serve
from aserve.server.listener import bind, url


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("0.0.0.0", "0.0.0.0"),
        ("localhost", "127.0.0.1"),
    ],
)
def test_free_port_and_options(host: str, shown: str) -> None:
    with bind(host, 0, user_timeout_s=12.5) as sock:
        port = sock.getsockname()[1]
        assert url(sock, tls=False) == f"http://{shown}:{port}" and port > 0
        with socket.create_connection((shown.strip("[]"), port)):
            accepted, _ = _accept(sock)
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12500


def _accept(sock: socket.socket) -> tuple[socket.socket, object]:
    sock.setblocking(True)
    return sock.accept()


def test_all_addresses_of_both_families() -> None:
    with bind("::", 0, user_timeout_s=1) as sock, socket.create_connection(("127.0.0.1", sock.getsockname()[1])):
        pass


def test_port_is_free_again_at_once() -> None:
    """A connection in TIME_WAIT from the last run does not keep the next one from starting."""
    with bind("127.0.0.1", 0, user_timeout_s=1) as sock:
        port = sock.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            _accept(sock)[0].close()
    bind("127.0.0.1", port, user_timeout_s=1).close()


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("203.0.113.1", 8000, "203.0.113.1:8000: this machine does not have that address"),
        ("no such host", 8000, "no such host:8000: the host name cannot be resolved"),
        ("127.0.0.1", 99999, "127.0.0.1:99999: a port lies between 0 and 65535"),
    ],
)
def test_addresses_that_cannot_be(host: str, port: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        bind(host, port, user_timeout_s=1)
    assert "\n" not in raised.value.message


def test_port_in_use() -> None:
    with bind("127.0.0.1", 0, user_timeout_s=1) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is in use"):
            bind("127.0.0.1", port, user_timeout_s=1)


@pytest.mark.parametrize(("hard", "connections"), [(100_000, 4096), (1000, 936), (10, 1)])
def test_connections_fit_the_files_that_the_system_allows(
    hard: int, connections: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(serve.resource, "getrlimit", lambda _: (256, hard))
    monkeypatch.setattr(serve.resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert serve._connections_that_fit(4096) == connections
    assert set_to == [(min(hard, 65536), hard)] * (hard > 256)
    assert len(caplog.records) == (connections < 4096)
