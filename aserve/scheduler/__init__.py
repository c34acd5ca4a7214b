"""Pure decisions: which sequences run next, and which KV blocks they hold. No torch, threads, clock or logging."""

from aserve.scheduler.invariants import check, check_idle
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.stats import SchedulerStats

__all__ = ["Scheduler", "SchedulerStats", "check", "check_idle"]
