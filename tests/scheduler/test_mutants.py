"""Faults planted in the scheduler: each must be found by the random histories that find none in the scheduler itself.

A mutant is one edit of one function, made on a copy of its source, so it cannot quietly stop being a fault: an edit
whose text is no longer there fails.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from history import FULL, WINDOWED, History
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from aserve.core.capacity import Capacity
from aserve.scheduler import prefix_key
from aserve.scheduler.host_cache import HostCache
from aserve.scheduler.kv_cache_manager import KVCacheManager
from aserve.scheduler.prefix_match import PrefixMatcher
from aserve.scheduler.scheduler import Scheduler

BUDGET = settings(
    max_examples=1500,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


class Mutant(NamedTuple):
    """``old`` in the source of ``owner.name`` becomes ``new``."""

    owner: Any
    name: str
    old: str
    new: str
    windows: tuple[tuple[int | None, ...], ...] = FULL
    num_host_blocks: tuple[int, ...] = (0,)


MIXED = {"windows": WINDOWED}
HOST = {"num_host_blocks": (1, 3, 8)}
IN_FLIGHT = "self._in_flight and sequence.last_step_id >= self._in_flight[0].step_id"
MUTANTS = {
    "missing fence": Mutant(Scheduler, "_release", IN_FLIGHT, "False"),
    "whole prompt from the cache": Mutant(
        PrefixMatcher, "_limit", "(len(sequence.token_ids) - 1)", "len(sequence.token_ids)"
    ),
    "published before its commit": Mutant(
        Scheduler,
        "_submit",
        "sequence.num_in_flight = num_in_flight + num_tokens",
        "sequence.num_computed += num_tokens; self.kv.publish(sequence); sequence.num_computed -= num_tokens; "
        "sequence.num_in_flight = num_in_flight + num_tokens",
    ),
    "double release": Mutant(
        Scheduler, "_lift_fences", "self.kv.release(block_ids)", "self.kv.release(block_ids + block_ids[:1])"
    ),
    "hash without parent": Mutant(prefix_key, "extend_hashes", "parent + data", "data"),
    "hash without salt": Mutant(prefix_key, "root_hash", "blake2b(cache_salt", "blake2b(b''"),
    "hash without group": Mutant(KVCacheManager, "__init__", "bytes([number])", "b''", **MIXED),
    "row of another epoch": Mutant(Scheduler, "commit", "sequence.epoch == epoch", "True"),
    "cache of another epoch": Mutant(KVCacheManager, "publish", "sequence.cache_epoch == self._epoch", "True"),
    "index kept by a reset": Mutant(KVCacheManager, "reset", "self.pool.clear_index()", "pass"),
    "preempted without reset": Mutant(Scheduler, "_preempt", "victim.forget_kv()", "victim.slot = -1"),
    "unordered iteration": Mutant(
        Scheduler, "_submit", "in draft.rows.items()", "in ((s, draft.rows[s]) for s in set(draft.rows))"
    ),
    "admission off by one": Mutant(Scheduler, "_start", "needed > room", "needed > room + 1"),
    "capacity off by one": Mutant(Capacity, "_longest", "return low *", "return (low + 1) *"),
    "trust in what failed": Mutant(Scheduler, "commit", "self.kv.withdraw(sequence)", "pass"),
    "capacity of a window off by one": Mutant(
        Capacity, "_window_blocks", "self.block_size + 2", "self.block_size + 1", **MIXED
    ),
    "window freed one block early": Mutant(
        KVCacheManager, "_drop_behind_windows", "sequence.num_computed)", "sequence.num_computed) + 1", **MIXED
    ),
    "window one position short": Mutant(Capacity, "first_block", "start - window + 1", "start - window + 2", **MIXED),
    "window freed while a step reads it": Mutant(
        KVCacheManager, "_drop_behind_windows", "sequence.num_computed)", "sequence.num_known)", **MIXED
    ),
    "match without its window": Mutant(
        PrefixMatcher, "_within_windows", "if index > first:", "if index > first + 1:", **MIXED
    ),
    "restore from a reused slot": Mutant(HostCache, "_take_slot", "if slot in self._pinned:", "if False:", **HOST),
    "save lost": Mutant(HostCache, "take_copies", "self._saves.items()", "list(self._saves.items())[1:]", **HOST),
    "restore lost": Mutant(KVCacheManager, "_restore", "self.host.restore(key, block_id)", "pass", **HOST),
    "mask without its last token": Mutant(
        Scheduler, "_schedule_decodes", "sequence.keeps_to_grammar and sequence.num_pending", "False"
    ),
    "text after a complete grammar": Mutant(Scheduler, "_take_token", "FinishReason.STOP if completes else", ""),
    "host kept by a reset": Mutant(KVCacheManager, "reset", "self.host.clear()", "pass", **HOST),
}


def edited(mutant: Mutant) -> Callable[..., Any]:
    """The function with the fault in it."""
    function = vars(mutant.owner)[mutant.name]
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is not, or more than once, in {mutant.name}"
    code = compile("from __future__ import annotations\n" + source.replace(mutant.old, mutant.new), "mutant", "exec")
    namespace = dict(function.__globals__)
    exec(code, namespace)
    return namespace[mutant.name]


def plant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fault wherever the scheduler's modules know the function."""
    original, faulty = vars(mutant.owner)[mutant.name], edited(mutant)
    monkeypatch.setattr(mutant.owner, mutant.name, faulty)
    for name, module in list(sys.modules.items()):
        if name.startswith("aserve.scheduler.") and vars(module).get(mutant.name) is original:
            monkeypatch.setattr(module, mutant.name, faulty)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_fault_can_still_be_planted(name: str) -> None:
    assert callable(edited(MUTANTS[name]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    plant(mutant, monkeypatch)
    machine = type("Mutated", (History,), {"windows": mutant.windows, "num_host_blocks": mutant.num_host_blocks})
    with pytest.raises(Exception) as caught:  # noqa: PT011 - an invariant, or whatever breaks first
        run_state_machine_as_test(machine, settings=BUDGET)
    print(f"{name}: {caught.value!r}")
