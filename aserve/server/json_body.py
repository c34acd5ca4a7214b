"""Request bodies as JSON objects, strictly: no NaN, no half surrogate pairs, no trailing text, bounded nesting.

Large bodies are parsed in a worker thread, so that the event loop goes on serving. Called by the generation routes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread
import orjson

from aserve.core.errors import InvalidRequestError

T = TypeVar("T")

_BOM = b"\xef\xbb\xbf"
LARGE_BODY_BYTES = 256 * 1024


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises InvalidRequestError with the place of the mistake.

    Of a doubled key the last value counts. A UTF-8 byte-order mark is skipped.
    """
    if not body.strip():
        raise InvalidRequestError("the request has no body; a JSON object is expected", param=None)
    try:
        value = orjson.loads(body.removeprefix(_BOM))
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    return cast(dict[str, Any], value)


async def parse_with(read: Callable[[bytes], T], body: bytes) -> T:
    """Apply a parser to a body: small ones here, large ones in a worker thread."""
    if len(body) < LARGE_BODY_BYTES:
        return read(body)
    return await anyio.to_thread.run_sync(read, body)
