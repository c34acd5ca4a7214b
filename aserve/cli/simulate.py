"""``aserve simulate``: requests, a machine and settings in, latencies out. The work is done by ``aserve.simulate``.

The command reads and writes files and compares; needs no model and loads no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aserve.cli.settings import ConfigFile, ShowConfig, setup_of, with_settings
from aserve.cli.sources import Sources
from aserve.core.config import CacheConfig, SchedulerConfig
from aserve.core.errors import ConfigError, OutputError
from aserve.simulate.compare import variants
from aserve.simulate.cost import MachineConfig
from aserve.simulate.setup import NOT_SIMULATED
from aserve.simulate.trace import TraceConfig

if TYPE_CHECKING:
    from aserve.simulate import Report, Setup, TraceRequest
    from aserve.simulate.simulation import Outcome

_GROUP = "Output"


def command(sources: Sources) -> Callable[..., int]:
    """The command, with one flag per setting of the scheduler, the machine and the requests."""

    @with_settings(TraceConfig, MachineConfig, SchedulerConfig, CacheConfig, without=NOT_SIMULATED)
    def simulate(
        *,
        compare: Annotated[tuple[str, ...], Parameter(group=_GROUP, negative=())] = (),
        as_json: Annotated[bool, Parameter(name="--json", group=_GROUP, negative=())] = False,
        plot: Annotated[str | None, Parameter(group=_GROUP)] = None,
        config: ConfigFile = None,
        show_config: ShowConfig = False,
        **values: Any,
    ) -> int:
        """Play requests to the real scheduler on a virtual clock, and print the latencies.

        The same flags give the same figures, whatever machine they run on. Costs are estimates: compare settings with
        each other, not with a clock.

        Parameters
        ----------
        compare
            A setting and its values, such as policy=fcfs,shortest-prefill: one run and one column each. With several
            of these flags, every combination runs.
        as_json
            Print the figures as JSON, times in seconds.
        plot
            Write running and waiting sequences and KV use over time to this SVG file.
        """
        setup = setup_of(values)
        if show_config:
            print(sources.show(setup.trace, setup.machine, setup.scheduler, setup.cache, without=NOT_SIMULATED))
            return 0
        runs = _run(variants(setup, compare))
        if plot is not None:
            _write_plot(plot, {title: outcome for title, (_, outcome) in runs.items()})
        reports = {title: report for title, (report, _) in runs.items()}
        if as_json:
            print(json.dumps([{"settings": title, **report.as_dict()} for title, report in reports.items()], indent=2))
        else:
            _print(reports, {title: outcome for title, (_, outcome) in runs.items()})
        return 0

    return simulate


def _run(setups: Mapping[str, Setup]) -> dict[str, tuple[Report, Outcome]]:
    from aserve.simulate import simulate
    from aserve.simulate.trace import random_trace

    traces: dict[TraceConfig, Sequence[TraceRequest]] = {}
    runs: dict[str, tuple[Report, Outcome]] = {}
    for title, setup in setups.items():
        trace = setup.trace
        if trace not in traces:
            traces[trace] = random_trace(trace) if trace.trace is None else _read_trace(trace.trace)
        runs[title] = simulate(setup, traces[trace])
    return runs


def _read_trace(path: str) -> Sequence[TraceRequest]:
    from aserve.simulate.trace import parse_trace

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--trace: cannot read {path}: {reason}") from error
    return parse_trace(text.splitlines(), path)


def _write_plot(path: str, outcomes: Mapping[str, Outcome]) -> None:
    from aserve.simulate.svg import draw

    try:
        Path(path).write_text(draw({title: o.timeline for title, o in outcomes.items()}), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def _print(reports: Mapping[str, Report], outcomes: Mapping[str, Outcome]) -> None:
    from aserve.simulate.report import table
    from aserve.simulate.timeline import plot

    print(table(reports))
    width = max(20, min(100, shutil.get_terminal_size().columns) - 17)
    for title, outcome in outcomes.items():
        print(f"\n{title}" if title else "")
        print(plot(outcome.timeline, width))
