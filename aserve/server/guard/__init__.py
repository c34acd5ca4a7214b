"""Hypercorn's trio server with the faults of one connection kept inside that connection."""

from aserve.server.guard.config import GuardConfig
from aserve.server.guard.connection import GuardedConnection, root_cause
from aserve.server.guard.server import GuardedServer

__all__ = ["GuardConfig", "GuardedConnection", "GuardedServer", "root_cause"]
