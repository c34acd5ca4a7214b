"""The reference pages that are made from the code: ``python -m aserve.cli.docs`` writes them, ``--check`` compares.

Command line and configuration come from the configuration classes, errors from the error tree, metrics from a scrape
of a server with a stand-in model. A developer's tool, run by ``make docs`` and the tests; needs no torch.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from aserve.cli.env import variable_of
from aserve.cli.main import build_app
from aserve.cli.settings import SERVER, TITLES, Setting, settings_of
from aserve.core import errors
from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, ModelConfig, ServerConfig
from aserve.core.memory import MemoryUse

REFERENCE = Path("docs") / "reference"
NOTE = "<!-- Made from the code by `make docs`; edit the code, not this page. -->"


def cli_page() -> str:
    """Every command with its flags."""
    text = build_app().generate_docs(output_format="markdown")
    start, commands = text.index("## Table of Contents"), text.index("**Commands**")
    text = text[:start] + text[commands:]
    text = re.sub(r"^(aserve [a-z-]+) -m [\w.]+", r"\1", text, flags=re.MULTILINE)  # how this process was started
    return f"{NOTE}\n\n{text.replace('# aserve', '# Command line', 1)}\n{_CLI_NOTES}"


def config_page() -> str:
    """Every setting: flag, variable, type, default, meaning."""
    parts = [NOTE, "# Configuration", _CONFIG_NOTES]
    for config_class in SERVER:
        rows = [
            (f"`{s.name}`", f"`{variable_of(s.flag)}`", _type_name(s.annotation), _default(s), s.help)
            for s in settings_of(config_class)
        ]
        heading = f"## {TITLES[config_class]}: `{config_class.__name__}`"
        parts += [heading, _first_line(config_class), _table(("field", "variable", "type", "default", "meaning"), rows)]
    return "\n\n".join(parts)


def errors_page() -> str:
    """Every error class with what a client gets."""
    rows = [(f"`{e.__name__}`", str(e.status), f"`{e.type}`", f"`{e.code}`", _first_line(e)) for e in _error_classes()]
    return "\n\n".join((NOTE, "# Errors", _ERROR_NOTES, _table(("class", "status", "type", "code", "meaning"), rows)))


def metrics_page() -> str:
    """Every series of ``/metrics``."""
    found = re.findall(r"# HELP (\S+) (.+)\n# TYPE \S+ (\w+)", _scrape())
    rows = [(f"`{name}`", kind, text) for name, text, kind in found if not name.startswith("vllm:")]
    known = [(f"`{name}`", kind, text) for name, text, kind in found if name.startswith("vllm:")]
    columns = ("series", "kind", "meaning")
    parts = (NOTE, "# Metrics", _METRIC_NOTES, _table(columns, rows), _VLLM_NOTES, _table(columns, known))
    return "\n\n".join(parts)


def _scrape() -> str:
    import anyio

    from aserve.engine.engine import run_engine
    from aserve.server.engine_slot import EngineSlot
    from aserve.server.metrics import render
    from aserve.server.request_counts import RequestCounts
    from aserve.testing import FakeExecutor, write_byte_tokenizer
    from aserve.text.tokenizer import Tokenizer

    memory = MemoryUse(device="a GPU", on_gpu=True, total=2**30, others=0, weights=0, activations=0)
    capacity = Capacity(
        num_blocks=8, block_size=16, max_num_seqs=2, max_batch_tokens=32, max_model_len=64, memory=memory
    )
    config = EngineConfig(model=ModelConfig(model="M"))

    async def scrape(tokenizer: Tokenizer) -> str:
        async with run_engine(
            executor_factory=lambda: FakeExecutor(capacity), tokenizer=tokenizer, config=config, model_names=("M",)
        ) as engine:
            return render(EngineSlot(engine), RequestCounts()).decode()

    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        return anyio.run(scrape, Tokenizer.load(Path(folder)), backend="trio")


def _error_classes() -> Iterator[type[errors.AserveError]]:
    for _, value in inspect.getmembers(errors, inspect.isclass):
        if issubclass(value, errors.AserveError) and value is not errors.AserveError:
            yield value


def _first_line(value: type) -> str:
    return (inspect.getdoc(value) or "").splitlines()[0]


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    inner = [argument for argument in get_args(annotation) if argument not in {type(None), ...}]
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(inner[0])}s"
    if inner:  # X | None
        return _type_name(inner[0])
    return {str: "text", bool: "on or off", int: "integer", float: "number"}[annotation]


def _default(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    value = setting.default
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None or value == () else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_CLI_NOTES = """\
## Exit codes

| code | when |
| --- | --- |
| 0 | done; for `serve`: stopped by SIGTERM or Ctrl-C, running requests finished or were closed after the drain time |
| 1 | failed: one line on stderr says why |
| 2 | wrong usage or settings: one line on stderr says which |
| 70 | `serve`: the engine failed while it ran |
| 128 + n | `serve`: ended at once by a second signal n; other commands: Ctrl-C (130) |

## Variables that are not flags

| variable | meaning |
| --- | --- |
| `ASERVE_CACHE` | folder of converted and downloaded models; default `$XDG_CACHE_HOME/aserve`, else `~/.cache/aserve` |
| `HF_HUB_OFFLINE` | 1: never ask the Hugging Face hub |
| `HF_TOKEN` | token for private models, read by huggingface_hub |

In Kubernetes, a service called `aserve` makes the cluster set `ASERVE_PORT` to an address, which is refused as a port:
set `enableServiceLinks: false` in the pod.
"""

_CONFIG_NOTES = f"""\
Every field is one flag of the command line (`--max-queue`), one variable (`ASERVE_MAX_QUEUE`) and one key of the file
named by `--config` (`max_queue = 8` in TOML, `max_queue: 8` in YAML). The command line wins over the environment, the
environment over the file, the file over the default. `--show-config` prints each value with its source. Lists are
repeated flags, or one variable with items separated by spaces. The flags that only `chat` or `generate` has, such as
`--temperature`, follow the same rules for that command.

Programs that embed aserve build the classes themselves: `EngineConfig(model=ModelConfig(model="smollm2-135m"))`.
`{ServerConfig.__name__}` belongs to the HTTP side; the others are parts of `EngineConfig`."""

_ERROR_NOTES = """\
Every failure that aserve foresees is one of these classes of `aserve.core.errors`. Over HTTP it is answered with the
status and `{"error": {"message", "type", "param", "code"}}`; `param` names the request field at fault. An error with a
known waiting time has a `Retry-After` header. In a stream whose headers have been sent, the error is the last event.
Programs that embed the engine catch the class."""

_METRIC_NOTES = """\
`GET /metrics` answers in Prometheus' text form. Counters have the suffix `_total` in a scrape, histograms `_bucket`,
`_count` and `_sum`. The series of the engine appear once it is ready."""

_VLLM_NOTES = """\
## Under vLLM's names

The same numbers under the names by which gateways and dashboards know vLLM's."""

PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "config.md": config_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
}


def pages() -> dict[str, str]:
    """The text of each generated page, by file name."""
    return {
        name: "\n".join(line.rstrip() for line in make().splitlines()).strip() + "\n" for name, make in PAGES.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with ``--check`` say which are out of date and return 1."""
    stale: list[str] = []
    for name, text in pages().items():
        path = REFERENCE / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path))
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"out of date, run `make docs`: {', '.join(stale)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
