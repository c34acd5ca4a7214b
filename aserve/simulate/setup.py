"""Everything that decides a run: settings of the server, the machine and the requests; and the run itself.

Called by the command line, tests and benchmarks. Settings that a server would choose by its device come from the
machine that is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aserve.core.capacity import Capacity
from aserve.core.config import CacheConfig, SchedulerConfig, check_lookahead
from aserve.core.errors import ConfigError
from aserve.scheduler import Scheduler
from aserve.simulate.cost import MachineConfig
from aserve.simulate.report import Report
from aserve.simulate.simulation import Outcome, Simulation
from aserve.simulate.trace import TraceConfig, TraceRequest, longest

NOT_SIMULATED = (
    "max_queue",
    "max_queue_tokens",
    "max_queue_wait_s",
    "kv_cache_memory",
    "gpu_memory_fraction",
    "host_cache_memory",
)
"""Settings that decide what is let in, or what fits a real device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run, but for its requests."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)

    def check(self) -> None:
        """Raise ConfigError if settings contradict each other. Not at once: a comparison sets them one by one."""
        check_lookahead(self.scheduler, self.cache)
        if self.machine.host_blocks and not self.cache.prefix_cache:
            raise ConfigError("--host-blocks keep prefixes, and --no-prefix-cache has none")

    def capacity(self) -> Capacity:
        """What the simulated machine holds."""
        preset, size = self.machine.preset, self.cache.block_size
        windows = tuple(window or None for window in self.machine.windows)
        parity = self.machine.parity_context
        num_tokens = self.cache.kv_cache_tokens or preset.kv_cache_tokens
        return Capacity(
            num_blocks=-(-num_tokens // size) * len(windows),  # tokens count for all layers, as on a server
            block_size=size,
            max_num_seqs=self.scheduler.max_num_seqs or preset.max_num_seqs,
            max_batch_tokens=self.scheduler.max_batch_tokens or preset.max_batch_tokens,
            max_model_len=2**31,
            max_in_flight=self.scheduler.max_in_flight or preset.max_in_flight,
            windows=windows,
            parity_context=(preset.parity_context if parity is None else parity) or None,
            num_host_blocks=self.machine.host_blocks,
        )

    def make_scheduler(self) -> Scheduler:
        """The scheduler that a server with these settings has."""
        return Scheduler(
            self.capacity(),
            policy=self.scheduler.policy,
            aging_steps=self.scheduler.aging_steps,
            prefix_lookahead=self.scheduler.prefix_lookahead,
            prefix_cache=self.cache.prefix_cache,
        )

    def alone_s(self, num_prompt_tokens: int) -> float:
        """Seconds to the first token of a prompt that finds the machine idle and the cache empty."""
        cost, capacity = self.machine.cost_model, self.capacity()
        budget, total_s = capacity.max_batch_tokens, 0.0
        for start in range(0, num_prompt_tokens, budget):
            chunk = (start, min(budget, num_prompt_tokens - start))
            total_s += cost.host_ms * 1e-3 + cost.step_s([chunk], capacity.windows)
        return total_s


def simulate(setup: Setup, trace: Sequence[TraceRequest]) -> tuple[Report, Outcome]:
    """Play a trace. Raises ConfigError if the settings contradict each other, or a request can never fit."""
    setup.check()
    most = setup.capacity().max_length
    if longest(trace) > most:
        raise ConfigError(
            f"the longest request has {longest(trace)} tokens and the KV cache holds {most}: set --kv-cache-tokens"
        )
    outcome = Simulation(setup.make_scheduler(), setup.machine.cost_model, trace).run()
    alone_s = [setup.alone_s(request.prompt_tokens) for request in trace]
    return Report.of(outcome, trace, alone_s), outcome
