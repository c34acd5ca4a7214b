"""``aserve generate``: a batch without a server, JSON lines in, JSON lines out in the same order.

The command opens files and the engine; the batch itself is ``batch``. The output is opened, and emptied, only when the
engine is there: a failed start leaves an older output as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from aserve.cli.batch_files import check_output, reading, writing
from aserve.cli.settings import ENGINE, ConfigFile, ShowConfig, engine_config, with_settings
from aserve.cli.sources import Sources
from aserve.core.errors import BatchError

if TYPE_CHECKING:
    from aserve.cli.batch import Counts
    from aserve.core.config import EngineConfig

UNLIMITED = 2**31
"""The batch limits itself, so the engine's own queue need not: a full queue would only fail lines."""


def command(sources: Sources) -> Callable[..., int]:
    """The command, with one flag per setting of the engine."""

    @with_settings(*ENGINE, without=("max_queue", "debug_load_delay_s"))
    def generate(
        *,
        input: Annotated[str, Parameter(alias="-i", group="Batch", allow_leading_hyphen=True)] = "-",
        output: Annotated[str, Parameter(alias="-o", group="Batch", allow_leading_hyphen=True)] = "-",
        max_tokens: Annotated[int | None, Parameter(group="Sampling")] = None,
        temperature: Annotated[float | None, Parameter(group="Sampling")] = None,
        top_p: Annotated[float | None, Parameter(group="Sampling")] = None,
        seed: Annotated[int | None, Parameter(group="Sampling")] = None,
        config: ConfigFile = None,
        show_config: ShowConfig = False,
        **values: Any,
    ) -> int:
        """Answer a batch of prompts: one JSON object per line in, one per line out, in the same order.

        A line is {"prompt": "..."} or {"messages": [...]}, with sampling fields beside it, and an "id" that is given
        back. A line that fails has "error" instead of "text"; the others go on, and the exit code is 1.

        Parameters
        ----------
        input
            File of JSON lines; - is stdin.
        output
            File to write to; - is stdout.
        max_tokens
            Longest answer in tokens, where a line has none; default: what the context leaves.
        temperature
            0 takes the most likely token; where a line has none.
        top_p
            Sample from the most likely tokens with this much probability together; where a line has none.
        seed
            Makes the answers repeatable; where a line has none.
        """
        settings = engine_config({**values, "max_queue": UNLIMITED})
        defaults = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        own = {"input": input, "output": output, **defaults}
        if show_config:
            print(sources.show(settings, own=own))
            return 0
        given = {name: value for name, value in defaults.items() if value is not None}
        with reading(input) as lines:
            check_output(output, lines)
            counts = _run(settings, lines, output, given)
        if counts.num_failed:
            raise BatchError(f"{counts.num_failed} of {counts.num_lines} lines failed: see their error field")
        return 0

    return generate


def _run(settings: EngineConfig, lines: TextIO, output: str, defaults: dict[str, Any]) -> Counts:
    import anyio

    from aserve.cli.batch import Batch
    from aserve.cli.launch import engine_opener, line_counter

    opener = engine_opener()

    async def run() -> Counts:
        async with opener(settings) as engine:
            with writing(output) as out, line_counter() as progress:
                return await Batch(engine, out, defaults, progress).run(lines)

    return anyio.run(run, backend="trio")
