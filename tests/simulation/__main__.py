"""``python -m tests.simulation --seeds 0:10000 --jobs 2``, or ``--replay SEED`` for one, with everything it did."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from multiprocessing import Pool

from tests.simulation.runner import Outcome, run_seed, run_seeds
from tests.simulation.scenario import draw

CHUNK = 50
REPORT_EVERY = 1000


def _run_chunk(seeds: range) -> tuple[int, float, list[tuple[int, str]]]:
    """How many were run, the seconds of processor time they took, and those that failed."""
    failures: list[tuple[int, str]] = []

    def note(outcome: Outcome) -> None:
        if outcome.violation is not None:
            failures.append((outcome.seed, outcome.violation))

    started_s = time.process_time()
    run_seeds(seeds, note)
    return len(seeds), time.process_time() - started_s, failures


def _chunks(seeds: range) -> list[range]:
    return [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]


def _replay(seed: int) -> int:
    print(draw(seed))
    outcome = run_seed(seed)
    for when_s, kind, *details in outcome.events:
        print(f"{when_s:12.6f}  {kind}", *details)
    print(f"seed {seed}: {outcome.violation or 'everything held'}; digest {outcome.digest}")
    return int(outcome.violation is not None)


def _run_all(seeds: range, jobs: int) -> int:
    started_s = time.perf_counter()
    done, failed, busy_s = 0, 0, 0.0
    with Pool(jobs) if jobs > 1 else nullcontext() as pool:
        results = map(_run_chunk, _chunks(seeds)) if pool is None else pool.imap_unordered(_run_chunk, _chunks(seeds))
        for count, seconds, failures in results:
            done += count
            busy_s += seconds
            failed += len(failures)
            for seed, violation in failures:
                print(f"seed {seed}: {violation}", flush=True)
            if done % REPORT_EVERY == 0:
                print(f"{done} seeds, {failed} failed", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started_s
    rates = f"{done / seconds:.0f} a second, {done / busy_s:.0f} a second of one core"
    print(f"{done} seeds in {seconds:.1f} s, {rates}; {failed} failed")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:end, the end not included")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print all its events")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return _replay(arguments.replay)
    first, end = map(int, arguments.seeds.split(":"))
    return _run_all(range(first, end), arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
