"""``aserve inspect``: what a model is, what is wrong with it, and whether it fits; its weights are not loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Parameter

from aserve.cli import env
from aserve.cli.sources import Sources
from aserve.core.config import EngineConfig, ModelConfig
from aserve.core.errors import ConfigError

if TYPE_CHECKING:
    from aserve.inspection.report import Report


def command(sources: Sources) -> Callable[..., int]:
    """The command."""
    del sources

    def inspect(
        model: Annotated[str, Parameter()],
        *,
        revision: str | None = None,
        gpu_memory: str | None = None,
        check_weights: bool = False,
        as_json: Annotated[bool, Parameter(name="--json")] = False,
    ) -> int:
        """Show what a model is: architecture, sizes, weights, tokenizer, chat template, and problems. Code 1 if there
        is one for which it cannot be served.

        Parameters
        ----------
        model
            A built-in name, a Hugging Face folder, a hub id, or a .gguf file.
        revision
            Revision of a hub id.
        gpu_memory
            Memory of a GPU, for example 24GiB: says what fits there.
        check_weights
            Read all weights, and name those that hold infinities or no numbers.
        as_json
            Print one JSON object.
        """
        from aserve.cli.launch import progress_bar
        from aserve.hub import resolve
        from aserve.inspection.report import inspect_folder

        with progress_bar(f"fetching {model}") as fetching:
            folder = resolve(
                model, revision=revision, cache_dir=env.cache_folder(), offline=env.offline(), progress=fetching
            )
        with progress_bar("reading weights") as reading:
            report = inspect_folder(folder, check_weights=check_weights, progress=reading)
        if gpu_memory is not None and report.spec is not None:
            _add_fit(report, model, folder, gpu_memory)
        print(_as_json(report) if as_json else "\n".join(_lines(model, report)))
        return 0 if report.can_be_served else 1

    return inspect


def _add_fit(report: Report, model: str, folder: Path, gpu_memory: str) -> None:
    """What ``aserve plan`` would say, in short. Raises ConfigError for a size that is none."""
    from aserve.planning.plan import capacity_of, make_plan, read_device
    from aserve.planning.table import full_length_requests

    device = read_device(gpu_memory, 1)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = report.sections[f"on a GPU of {gpu_memory}"] = {}
    try:
        capacity = capacity_of(make_plan(EngineConfig(model=ModelConfig(model=model)), config, device))
    except ConfigError as error:
        report.warn(error.message)
        facts["fits"] = "no"
        return
    facts["fits"] = "yes"
    facts["KV tokens"] = capacity.num_kv_tokens
    facts["longest request"] = capacity.max_length
    facts["of that length in parallel"] = full_length_requests(capacity)


def _as_json(report: Report) -> str:
    problems = [problem._asdict() for problem in report.problems]
    return json.dumps({**report.sections, "problems": problems, "can_be_served": report.can_be_served})


def _lines(model: str, report: Report) -> Iterator[str]:
    yield model
    for title, facts in report.sections.items():
        if facts:
            yield f"\n{title}"
            for name, value in facts.items():
                yield f"  {name:40}{_shown(name, value)}"
    if report.problems:
        yield "\nproblems"
        for severity, text in report.problems:
            yield f"  {severity}: {text}"
    yield "\ncan be served" if report.can_be_served else "\ncannot be served as it is"


def _shown(name: str, value: Any) -> str:
    if name == "bytes":
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        facts = cast("dict[str, Any]", value)
        return ", ".join(f"{key} {_shown('', each)}" for key, each in facts.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, cast("list[Any]", value))) or "none"
    return str(value)
