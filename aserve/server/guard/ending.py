"""What a connection's protocols know of the end of their server. Owned by ``connection``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Ending:
    """``winding``: requests are still answered, but each answer may be the last one of its connection."""

    winding: bool = False
