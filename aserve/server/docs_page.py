"""``/docs``: ``/openapi.json`` for people, one page that loads nothing from elsewhere and can send requests.

What the page may do is bound by its policy: its one script, known by its hash, and requests to this server.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from aserve.server.reply import Reply


@cache
def docs_page() -> Reply:
    """The page. It holds nothing of the server and asks for a key itself, so it is open to everybody."""
    page = files("aserve.server").joinpath("docs_page.html").read_bytes()
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Reply(
        200, page, [(b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", policy.encode())]
    )
