"""API keys: which requests may pass. Keys are compared as digests in constant time and never logged."""

from __future__ import annotations

import hashlib
import hmac

from aserve.core.errors import AuthenticationError
from aserve.server.asgi import RequestHead


class ApiKeys:
    """The configured keys; without any, everything passes."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = tuple(_digest(key.strip().encode()) for key in keys)

    def check(self, head: RequestHead) -> None:
        """Raise AuthenticationError unless the request carries one of the keys as ``Authorization: Bearer KEY``."""
        if not self._digests:
            return
        given = head.all_headers(b"authorization")
        if not given:
            raise AuthenticationError("an API key is required; send it as Authorization: Bearer KEY")
        if any(value != given[0] for value in given):
            raise AuthenticationError("the request has several differing Authorization headers")
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer" or not self._known(key.strip()):
            raise AuthenticationError("the API key is not valid")

    def _known(self, key: bytes) -> bool:
        digest = _digest(key)
        known = False
        for other in self._digests:  # no early end: the time must not tell which key is near
            known |= hmac.compare_digest(digest, other)
        return known


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
