"""What a step costs on a machine that is not there: a linear model of its time, and two machines known by name.

Knows plans, and nothing of how they come about. Used by ``simulation`` for every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from aserve.core.errors import ConfigError
from aserve.core.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The device computes a step in the sum of these; times in the unit of the name.

    Attributes:
        host_ms: planning and reading of a step; hidden behind the device's work when two steps are in flight.
        step_ms: every step: reading the weights, launching the kernels.
        prefill_token_us: every prompt token.
        decode_row_us: every sequence that computes one token.
        kv_token_ns: every token of context that a row reads.
        attention_pair_ns: every pair of a prompt token and a token that it attends to.
        block_copy_us: every KV block copied between device and host.
    """

    host_ms: float = 0.0
    step_ms: float = 0.0
    prefill_token_us: float = 0.0
    decode_row_us: float = 0.0
    kv_token_ns: float = 0.0
    attention_pair_ns: float = 0.0
    block_copy_us: float = 0.0

    def device_s(self, plan: StepPlan, windows: Sequence[int | None] = (None,)) -> float:
        """Seconds that the device computes a plan. ``windows`` are those of ``Capacity``."""
        rows = [(row.start, len(row.token_ids)) for row in plan.sequences]
        return self.step_s(rows, windows) + (len(plan.saves) + len(plan.restores)) * self.block_copy_us * 1e-6

    def step_s(self, rows: Iterable[tuple[int, int]], windows: Sequence[int | None] = (None,)) -> float:
        """Seconds of a step with these rows: the position at which each starts, and its number of tokens."""
        total_us, attention_ns = self.step_ms * 1e3, 0.0
        for start, count in rows:
            total_us += self.decode_row_us if count == 1 else count * self.prefill_token_us
            for window in windows:
                # a windowed layer reads what the window touches; the pairs of a chunk longer than it are a bit more
                behind = start if window is None else min(start, window)
                attention_ns += (behind + count) * self.kv_token_ns
                if count > 1:
                    attention_ns += count * (behind + (count + 1) / 2) * self.attention_pair_ns
        return total_us * 1e-6 + attention_ns / len(windows) * 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cost model, and the limits with which a server would start there.

    Attributes:
        parity_context: what a server works out from the model's sizes; the costs say otherwise, as they do on a server.
    """

    cost: CostModel
    kv_cache_tokens: int
    max_num_seqs: int
    max_batch_tokens: int
    max_in_flight: int
    parity_context: int


PRESETS: Mapping[str, Machine] = {
    "cpu": Machine(
        cost=CostModel(
            host_ms=0.3,
            step_ms=9.0,
            prefill_token_us=350.0,
            decode_row_us=1200.0,
            kv_token_ns=1100.0,
            attention_pair_ns=200.0,
            block_copy_us=20.0,
        ),
        kv_cache_tokens=65_536,
        max_num_seqs=32,
        max_batch_tokens=512,
        max_in_flight=1,
        parity_context=1_536,
    ),
    "h200": Machine(
        cost=CostModel(
            host_ms=1.0,
            step_ms=3.7,
            prefill_token_us=20.2,
            decode_row_us=20.0,
            kv_token_ns=14.0,
            attention_pair_ns=2.0,
            block_copy_us=18.0,
        ),
        kv_cache_tokens=1_900_000,
        max_num_seqs=256,
        max_batch_tokens=8192,
        max_in_flight=2,
        parity_context=16_256,
    ),
}
"""Two machines by name. h200 is fitted to docs/explanation/performance.md: with 32 and 256 requests at a time it gives
the throughput there within 2 %. cpu is a round estimate of two cores at 38 GB/s and 0.5 TFLOP/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """The machine that is simulated: a known one, and what is different about it.

    Attributes:
        machine: Where the costs and the limits that are not given come from. cpu is SmolLM2-135M on two cores, a round
            estimate; h200 is a 7B model in bfloat16 on one H200, fitted to measurements.
        host_ms: Milliseconds per step to plan and to read.
        step_ms: Milliseconds of every step.
        prefill_token_us: Microseconds per prompt token.
        decode_row_us: Microseconds per sequence that decodes.
        kv_token_ns: Nanoseconds per token of context read by a row.
        attention_pair_ns: Nanoseconds per pair of a prompt token and a token it attends to.
        block_copy_us: Microseconds per KV block copied between device and host.
        parity_context: Context at which the scheduler takes a prompt's token to cost twice as much as one without;
            default what a server works out for the model; 0: it counts tokens alone.
        windows: Attention window of each KV group of the model, 0 for a group that sees everything.
        host_blocks: KV blocks of host memory for prefixes that had to leave the cache.
    """

    machine: Literal["cpu", "h200"] = "cpu"
    host_ms: float | None = None
    step_ms: float | None = None
    prefill_token_us: float | None = None
    decode_row_us: float | None = None
    kv_token_ns: float | None = None
    attention_pair_ns: float | None = None
    block_copy_us: float | None = None
    parity_context: int | None = None
    windows: tuple[int, ...] = (0,)
    host_blocks: int = 0

    def __post_init__(self) -> None:
        for f in fields(CostModel):
            value = getattr(self, f.name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"--{f.name.replace('_', '-')} must be 0 or more, got {value}")
        if min(self.host_blocks, self.parity_context or 0, *(self.windows or (-1,))) < 0:
            raise ConfigError("--host-blocks, --parity-context and --windows must be 0 or more")
        if self.cost_model.step_ms + self.cost_model.host_ms <= 0:
            raise ConfigError("--step-ms and --host-ms must not both be 0: time would stand still")

    @property
    def preset(self) -> Machine:
        """The machine named, as it is known."""
        return PRESETS[self.machine]

    @property
    def cost_model(self) -> CostModel:
        """Its costs, with what was given in place of what is known."""
        known = self.preset.cost
        given = {f.name: getattr(self, f.name) for f in fields(CostModel)}
        return CostModel(**{name: getattr(known, name) if value is None else value for name, value in given.items()})
