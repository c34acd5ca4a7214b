"""What the scheduler costs per step, in milliseconds of one core; and whether that grows with what is not in the step.

    python tests/benchmarks/bench_scheduler.py [--rounds 9] [--steps 200]

A step is one ``plan`` and one ``commit``. Cases that are compared are measured in turn, A B A B ..., and the median of
the rounds' medians is printed, so that a machine whose speed drifts slows both.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aserve.core.capacity import Capacity
from aserve.core.request import Request, SamplingParams
from aserve.core.step import StepPlan, StepResult
from aserve.scheduler import Scheduler

BLOCK_SIZE = 16


@dataclass
class Bench:
    """A scheduler in a steady state, and the requests that keep it there."""

    num_blocks: int
    num_seqs: int
    max_batch_tokens: int = 8192
    options: Mapping[str, int | str] = field(default_factory=dict)
    num_added: int = 0

    def __post_init__(self) -> None:
        capacity = Capacity(
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.num_seqs,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=2**31,
        )
        self.scheduler = Scheduler(capacity, **self.options)  # type: ignore[arg-type]  # options by name

    def add(self, num_prompt_tokens: int, max_tokens: int, *, name: int | None = None) -> str:
        """Queue a request; prompts of one ``name`` begin alike, as far as they go."""
        self.num_added += 1
        own = self.num_added + 10**6 if name is None else name
        request = Request(
            request_id=str(self.num_added),
            prompt_token_ids=(own, *(0,) * (num_prompt_tokens - 1)),
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_index=self.num_added,
        )
        self.scheduler.add(request)
        return request.request_id

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.scheduler.commit(StepResult(plan.step_id, (1,) * sum(row.samples for row in plan.sequences)))
        return plan

    def time_steps(self, count: int) -> list[float]:
        """Seconds of this thread in each of ``count`` steps, the collector of cycles on as in a server."""
        times: list[float] = []
        for _ in range(count):
            started = time.thread_time()
            self.step()
            times.append(time.thread_time() - started)
        return times

    def decode(self, num_seqs: int, *, context: int = 256) -> None:
        """Bring ``num_seqs`` sequences to where each step computes one token of each, for good."""
        for _ in range(num_seqs):
            self.add(context, 10**6 // max(1, num_seqs))
        while any(len(row.token_ids) > 1 for row in (self.step() or StepPlan(0, ())).sequences):
            pass

    def cache(self, num_blocks: int, *, each: int = 1024) -> None:
        """Fill the prefix cache with this many blocks that nobody holds."""
        for _ in range(num_blocks // each):
            self.add(each * BLOCK_SIZE + 1, 1)
            while self.scheduler.has_work:
                self.step()


def compare(cases: Mapping[str, Bench], rounds: int, steps: int) -> dict[str, float]:
    """Median milliseconds per step of each case, measured in turn."""
    medians: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, bench in cases.items():
            gc.collect()
            bench.time_steps(5)
            medians[name].append(statistics.median(bench.time_steps(steps)) * 1e3)
    return {name: statistics.median(values) for name, values in medians.items()}


def decoding(num_seqs: int, *, num_waiting: int = 0, num_cached: int = 0, **options: int | str) -> Bench:
    """``num_seqs`` decode in a batch of as many; the rest of the pool holds cached prefixes and is full of them."""
    need = num_seqs * (16 + 200)
    bench = Bench(max(num_cached, need) + need, num_seqs, options=options)
    if num_cached:
        bench.cache(num_cached)
    bench.decode(num_seqs)
    for _ in range(num_waiting):
        bench.add(256, 16)
    return bench


def show(title: str, cases: Mapping[str, Bench], args: argparse.Namespace) -> None:
    medians = compare(cases, args.rounds, args.steps)
    first = next(iter(medians.values()))
    for name, value in medians.items():
        ratio = f"  x {value / first:.2f}" if len(medians) > 1 else ""
        print(f"{title:34} {name:>12}  {value:7.3f} ms{ratio}", flush=True)


def blocked_head(num_prompt_tokens: int, num_steps: int) -> Bench:
    """256 sequences decode for so many steps; the next request, whose prompt is cached so far, never has room."""
    num_spare = 256 * num_steps // BLOCK_SIZE
    bench = Bench(num_prompt_tokens // BLOCK_SIZE + 256 * 17 + num_spare, 257)
    bench.add(num_prompt_tokens + 1, 1, name=1)
    while bench.scheduler.has_work:
        bench.step()
    bench.decode(256)
    bench.add(num_prompt_tokens + BLOCK_SIZE * num_spare, 16, name=1)
    bench.time_steps(20)  # its prompt is hashed in pieces
    return bench


def longest_pause(num_prompt_tokens: int, rounds: int) -> float:
    """Milliseconds of the longest step in which 256 sequences decode while a cached prompt arrives and is admitted."""
    pauses: list[float] = []
    for _ in range(rounds):
        bench = Bench(3 * num_prompt_tokens // BLOCK_SIZE + 256 * 40, 257)
        bench.add(num_prompt_tokens + 1, 1, name=1)
        while bench.scheduler.has_work:
            bench.step()
        bench.decode(256)
        bench.add(num_prompt_tokens + 1, 16, name=1)
        gc.collect()
        pauses.append(max(bench.time_steps(40)) * 1e3)
    return statistics.median(pauses)


CASES: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "decoding": lambda args: [show(f"{n} decode", {"": decoding(n)}, args) for n in (256, 1024)] and None,
    "waiting": lambda args: (
        [
            show(
                f"256 decode, waiting, {policy}",
                {str(n): decoding(256, num_waiting=n, policy=policy, prefix_lookahead=ahead) for n in (10, 10_000)},
                args,
            )
            for policy, ahead in (("fcfs", 0), ("shortest-prefill", 0), ("fcfs", 8))
        ]
        and None
    ),
    "cached": lambda args: show(
        "256 decode, cached blocks", {f"{n:.0e}": decoding(256, num_cached=n) for n in (10_240, 1_024_000)}, args
    ),
    "head": lambda args: show(
        "256 decode, the next one blocked",
        {f"{n} tokens": blocked_head(n, (args.rounds + 1) * (args.steps + 5)) for n in (1_024, 131_072)},
        args,
    ),
    "pause": lambda args: print(f"longest step, 131072 cached tokens arrive: {longest_pause(131_072, 5):.2f} ms"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    for name in args.cases or CASES:
        CASES[name](args)


if __name__ == "__main__":
    main()
