"""Seeds in which everything must hold, and that a seed is all there is to a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.runner import Outcome, run_seed, run_seeds

SEEDS = range(300)
REPLAYED = range(1000, 1012)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    seen: list[Outcome] = []
    run_seeds(SEEDS, seen.append)
    return seen


def test_everything_holds(outcomes):
    assert [(o.seed, o.violation) for o in outcomes if o.violation] == []
    assert len(outcomes) == len(SEEDS)


def test_what_could_happen_does(outcomes):
    """A simulation in which nothing happens holds, too."""
    seen: Counter[str] = Counter()
    for outcome in outcomes:
        for _, kind, *details in outcome.events:
            seen[kind] += 1
            if kind in ("error", "answers", "health"):
                seen[f"{kind} {' '.join(map(str, details[kind != 'health' :]))}"] += 1
            elif kind == "asks":
                seen[details[1]] += 1
                seen[details[2]] += 1
    wanted = {
        *("http", "stream", "generation", "probe", "stays", "leaves", "half body", "stuck", "slow", "deadline"),
        *("answers 200", "answers 400", "answers 404", "answers 408", "answers 413", "answers 415", "answers 429"),
        *("error 500 generation_failed", "error 503 engine_dead", "error 503 engine_draining", "error 503 queue_full"),
        *(
            "error 503 engine_loading",
            "error 503 queue_timeout",
            "error 504 deadline_exceeded",
            "error 504 idle_timeout",
        ),
        *(
            "error 200 engine_dead",
            "error 200 engine_draining",
            "error 200 generation_failed",
            "error 200 idle_timeout",
        ),
        *("health ok ok", "health ok draining", "health dead dead", "health loading loading", "health closed closed"),
        *("pause", "prefix cache reset", "second signal", "step fails", "the device hangs", "the time of day changes"),
    }
    assert wanted - set(seen) == set()
    assert seen["tokens"] > 10 * len(SEEDS)
    assert seen["answers 200"] > len(SEEDS)


def test_a_seed_gives_the_same_events_each_time():
    assert [run_seed(seed).digest for seed in REPLAYED] == [run_seed(seed).digest for seed in REPLAYED]


def test_a_seed_gives_the_same_events_in_another_process():
    """With other hashes of strings and other addresses of objects, on which the order of sets depends."""
    code = (
        "import json; from tests.simulation.runner import run_seed;"
        f"print(json.dumps([run_seed(seed).digest for seed in {REPLAYED!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "4711", "PYTHONPATH": "."},
        capture_output=True,
        check=True,
        text=True,
    )
    assert json.loads(done.stdout) == [run_seed(seed).digest for seed in REPLAYED]


def test_the_command_line_replays_and_counts(capsys, monkeypatch):
    from tests.simulation.__main__ import main

    monkeypatch.setattr(sys, "argv", ["simulation", "--replay", "3"])
    assert main() == 0
    replayed = capsys.readouterr().out
    assert run_seed(3).digest in replayed
    assert "asks" in replayed
    monkeypatch.setattr(sys, "argv", ["simulation", "--seeds", "0:3"])
    assert main() == 0
    assert "3 seeds in" in capsys.readouterr().out


@pytest.mark.slow
def test_ten_thousand_seeds():
    failures: list[Outcome] = []
    run_seeds(range(10_000), lambda outcome: failures.extend([outcome] * bool(outcome.violation)))
    assert [(o.seed, o.violation) for o in failures] == []
