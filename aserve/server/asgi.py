"""The request's head as the server sees it, and the types of an ASGI application.

Knows HTTP and ASGI, nothing of models or generations. Used by every module that answers a request.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """Method, path and headers of one request.

    Attributes:
        path: relative to the ``root_path`` under which a host program has mounted the application.
        headers: as received; names in lower case.
        request_id: the client's X-Request-Id where that is harmless, else a new one.
        reply_headers: added to whatever is answered (request id, CORS).
    """

    method: str
    path: str
    headers: RawHeaders
    http_version: str
    request_id: str
    reply_headers: RawHeaders = field(default_factory=list[tuple[bytes, bytes]])

    @classmethod
    def from_scope(cls, scope: Scope) -> RequestHead:
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        given = next((value for name, value in headers if name == b"x-request-id"), None)
        sane = given is not None and _SANE_ID.fullmatch(given) is not None
        request_id = given.decode("ascii") if sane and given is not None else uuid.uuid4().hex
        return cls(
            method=scope["method"],
            path=relative_path(scope),
            headers=headers,
            http_version=scope.get("http_version", "1.1"),
            request_id=request_id,
            reply_headers=[(b"x-request-id", request_id.encode())],
        )

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name (lower case), without surrounding blanks."""
        for key, value in self.headers:
            if key == name:
                return value.strip()
        return None

    def all_headers(self, name: bytes) -> list[bytes]:
        return [value.strip() for key, value in self.headers if key == name]

    @property
    def is_http1(self) -> bool:
        return self.http_version.startswith("1")


def relative_path(scope: Scope) -> str:
    """The path below ``root_path``. Hosts differ in whether ``path`` contains it; both are understood."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("/", ""):
        return path[len(root) :] or "/"
    return path
