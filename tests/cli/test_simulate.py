"""``aserve simulate`` as a command: tables, JSON, pictures, traces from files, and what is refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from aserve.cli.batch_files import cannot_write
from aserve.cli.main import main
from aserve.cli.simulate import _write_plot
from aserve.core.errors import OutputError
from aserve.simulate.simulation import Outcome

FEW = ["simulate", "--requests", "30", "--rate", "5", "--output-tokens", "10"]


def test_one_run_prints_figures_and_a_plot(capsys) -> None:
    assert main(FEW) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("TTFT p99", "ITL p50", "queue p90", "prefix hits", "running", "█"))


def test_runs_stand_side_by_side(capsys) -> None:
    assert main([*FEW, "--compare", "policy=fcfs,shortest-prefill", "--compare", "max-num-seqs=2,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["fcfs", "fcfs", "shortest-prefill", "shortest-prefill"]
    assert lines[1].split() == ["max_num_seqs=2", "max_num_seqs=4"] * 2
    assert len(next(line for line in lines if line.startswith("requests")).split()) == 5


def test_json_has_a_run_per_object_and_nothing_else(capsys) -> None:
    assert main([*FEW, "--json", "--compare", "policy=fcfs,priority"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["settings"] for run in runs] == ["fcfs", "priority"]
    assert runs[0]["num_requests"] == 30
    assert runs[0]["ttft_s"]["p50"] > 0


def test_the_picture_is_svg(capsys, tmp_path) -> None:
    assert main([*FEW, "--plot", str(tmp_path / "a.svg"), "--compare", "max_num_seqs=1,2,8"]) == 0
    tree = ET.parse(tmp_path / "a.svg")
    assert len(tree.findall(".//{http://www.w3.org/2000/svg}polyline")) == 9
    assert main([*FEW, "--plot", str(tmp_path / "no" / "a.svg")]) == 1
    assert "error: cannot write" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_an_error_with_a_name() -> None:
    outcome = Outcome([])
    outcome.timeline.add(0.0, 0, 0, 0.0)
    with pytest.raises(OutputError, match=r"cannot write /nowhere/a\.svg: No such file"):
        _write_plot("/nowhere/a.svg", {"": outcome})
    assert isinstance(cannot_write(OSError("full")), OutputError)


def test_a_trace_is_read(capsys, tmp_path) -> None:
    lines = "\n".join(json.dumps({"arrival_s": n, "prompt_tokens": 40, "output_tokens": 3}) for n in range(4))
    (tmp_path / "trace.jsonl").write_text(lines)
    assert main(["simulate", "--json", "--trace", str(tmp_path / "trace.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)[0]["num_requests"] == 4


def test_settings_come_from_the_environment_and_are_shown(capsys, monkeypatch) -> None:
    monkeypatch.setenv("ASERVE_POLICY", "priority")
    assert main(["simulate", "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert "ASERVE_POLICY" in next(line for line in shown.splitlines() if line.startswith("policy "))
    assert "max_queue" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "/nowhere/t.jsonl"], "--trace: cannot read /nowhere/t.jsonl: No such file"),
        (["--prompt-tokens", "some"], "--prompt-tokens: 'some' is no length"),
        (["--compare", "policy=best"], "'best' is no value for policy"),
        (["--policy", "best"], "best"),
        (["--prompt-tokens", "99999"], "set --kv-cache-tokens"),
        (["--max-queue", "3"], "--max-queue"),
        (["--prompt-tokens", "lognormal:300:1000"], "--prompt-tokens: 'lognormal:300:1000' is no length"),
        (["--kv-cache-tokens", "16", "--windows", "0", "--windows", "512"], "holds 16: set --kv-cache-tokens"),
        (["--compare", "max-queue=1,2"], "'max_queue' makes no difference in a simulation"),
        (["--compare", "kv_cache_memory=1GiB,2GiB"], "'kv_cache_memory' makes no difference in a simulation"),
        (["--no-prefix-cache", "--prefix-lookahead", "4"], "--prefix-lookahead looks for cached prefixes, and --no-p"),
        (["--no-prefix-cache", "--host-blocks", "4"], "--host-blocks keep prefixes, and --no-prefix-cache"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, arguments, message) -> None:
    assert main(["simulate", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
