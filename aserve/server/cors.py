"""Cross-origin rules: which web pages may call the server from a browser.

Without configured origins no header is added and browsers refuse cross-origin pages by themselves.
"""

from __future__ import annotations

from aserve.server.asgi import RawHeaders, RequestHead

_EXPOSED = (b"access-control-expose-headers", b"x-request-id, retry-after")
_DEFAULT_HEADERS = b"authorization, content-type, x-request-id, x-request-timeout, x-queue-timeout, x-idle-timeout"


class Cors:
    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    def reply_headers(self, head: RequestHead) -> RawHeaders:
        """Headers that let the page of this request read the answer; none if it may not."""
        if not self._origins:
            return []
        origin = head.header(b"origin")
        if self._any:
            return [] if origin is None else [(b"access-control-allow-origin", b"*"), _EXPOSED]
        vary = (b"vary", b"Origin")
        if origin is None or origin not in self._origins:
            return [vary]
        return [(b"access-control-allow-origin", origin), vary, _EXPOSED]

    def preflight_headers(self, head: RequestHead, methods: str) -> RawHeaders:
        """What an OPTIONS request is told beyond ``reply_headers``."""
        if head.header(b"access-control-request-method") is None or not self.reply_headers(head):
            return []
        asked = head.header(b"access-control-request-headers") or _DEFAULT_HEADERS
        return [
            (b"access-control-allow-methods", methods.encode()),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", b"600"),
        ]
