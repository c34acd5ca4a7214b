"""API keys: which requests may pass, and how many of each key at once. Keys are never logged.

Keys are compared as digests in constant time. Knows HTTP headers, nothing of engines. Used by the application.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import anyio

from aserve.core.config import ServerConfig
from aserve.core.errors import AuthenticationError, ConcurrencyLimitError, ConfigError
from aserve.engine.drain_rate import DrainRate
from aserve.server.asgi import RequestHead


class Caller:
    """Whoever has one of the keys, or everybody where there are none; and the requests in progress.

    Args:
        limit: most requests at once; None for any number.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._drain_rate = DrainRate()
        self.num_active = 0

    def refuse_if_busy(self) -> None:
        """Raise ConcurrencyLimitError if one request more would be too many."""
        if self._limit is not None and self.num_active >= self._limit:
            raise ConcurrencyLimitError(
                f"{self.num_active} requests with this API key are in progress, its limit; wait for one to end",
                retry_after_s=self._drain_rate.wait_s(1, anyio.current_time()),
            )

    @contextmanager
    def request(self) -> Generator[None]:
        """One request, from where it costs something to its end."""
        if not self.num_active:
            self._drain_rate.begin(anyio.current_time())
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1
            self._drain_rate.note(1, anyio.current_time())


class ApiKeys:
    """The configured keys; without any, everything passes.

    Raises:
        ConfigError: a key is no UTF-8, the key file cannot be read or holds no key, or a limit per key is set and there
            are no keys.
    """

    def __init__(self, server: ServerConfig) -> None:
        keys = [key.strip() for key in server.api_key]
        if server.api_key_file is not None:
            keys += _read_keys(server.api_key_file)
        if server.max_requests_per_key is not None and not keys:
            raise ConfigError("--max-requests-per-key needs --api-key or --api-key-file")
        self._callers = {_digest(_encode(key)): Caller(server.max_requests_per_key) for key in keys}
        self._everybody = Caller()

    def check(self, head: RequestHead) -> Caller:
        """Return whose key the request carries as ``Authorization: Bearer KEY``. Raises AuthenticationError."""
        if not self._callers:
            return self._everybody
        given = head.all_headers(b"authorization")
        if not given:
            raise AuthenticationError("an API key is required; send it as Authorization: Bearer KEY")
        if any(value != given[0] for value in given):
            raise AuthenticationError("the request has several differing Authorization headers")
        scheme, _, key = given[0].partition(b" ")
        caller = self._find(key.strip())
        if scheme.lower() != b"bearer" or caller is None:
            raise AuthenticationError("the API key is not valid")
        return caller

    def _find(self, key: bytes) -> Caller | None:
        digest = _digest(key)
        found = None
        for other, caller in self._callers.items():  # no early end: the time must not tell which key is near
            if hmac.compare_digest(digest, other):
                found = caller
        return found


def _encode(key: str) -> bytes:
    try:
        return key.encode()
    except UnicodeEncodeError:  # so Python represents other bytes of the environment and the command line
        raise ConfigError("--api-key (or ASERVE_API_KEY) must be UTF-8") from None  # the cause would show the key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read_keys(file: str) -> list[str]:
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {file} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file: {file} holds no key, which would let everybody in")
    return keys
