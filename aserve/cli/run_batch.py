"""``aserve run-batch``: a file in the format of OpenAI's batch API, answered without a server."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from aserve.cli.batch_files import cannot_write, check_output, reading
from aserve.cli.generate import UNLIMITED
from aserve.cli.settings import ENGINE, ConfigFile, ShowConfig, engine_config, with_settings
from aserve.cli.sources import Sources
from aserve.core.errors import BatchError, ConfigError

if TYPE_CHECKING:
    from aserve.cli.openai_batch import OpenAIBatch
    from aserve.core.config import EngineConfig


def command(sources: Sources) -> Callable[..., int]:
    """The command, with one flag per setting of the engine."""

    @with_settings(*ENGINE, without=("max_queue", "max_queue_wait_s", "debug_load_delay_s"))
    def run_batch(
        *,
        input: Annotated[str, Parameter(alias="-i", group="Batch", allow_leading_hyphen=True)],
        output: Annotated[str, Parameter(alias="-o", group="Batch", allow_leading_hyphen=True)],
        config: ConfigFile = None,
        show_config: ShowConfig = False,
        **values: Any,
    ) -> int:
        """Answer a file in the format of OpenAI's batch API: {"custom_id", "method", "url", "body"} per line.

        Each answer is a line {"id", "custom_id", "response", "error"}, written as soon as it is there. Run again with
        the same output, it asks only for what has no good answer yet. The exit code is 1 if a line failed.

        Parameters
        ----------
        input
            File of requests; - is stdin.
        output
            File to write to; answers that it holds already are kept.
        """
        settings = engine_config({**values, "max_queue": UNLIMITED})
        if show_config:
            print(sources.show(settings, own={"input": input, "output": output}))
            return 0
        if output == "-":
            raise ConfigError("--output must be a file: it is what a run that was interrupted goes on from")
        with reading(input) as lines:
            check_output(output, lines)
            batch = _run(settings, lines, Path(output))
        if batch.num_failed:
            raise BatchError(f"{batch.num_failed} of {batch.num_lines} requests failed: see the output")
        return 0

    return run_batch


def _run(settings: EngineConfig, lines: TextIO, output: Path) -> OpenAIBatch:
    import anyio

    from aserve.cli.launch import engine_opener, line_counter
    from aserve.cli.openai_batch import WINDOW_STEPS, OpenAIBatch, answered
    from aserve.server.app import create_app

    opener = engine_opener()

    async def run() -> OpenAIBatch:
        async with opener(settings) as engine:
            done = answered(output)
            with _appending(output) as out, line_counter() as progress:
                num_at_once = WINDOW_STEPS * engine.capacity.max_num_seqs
                app = create_app(engine=engine)
                batch = OpenAIBatch(app, out, done=done, num_at_once=num_at_once, progress=progress)
                await batch.run(lines)
                return batch

    return anyio.run(run, backend="trio")


@contextmanager
def _appending(path: Path) -> Generator[TextIO]:
    """Raises ConfigError if the file cannot be opened, OutputError if it cannot be written to its end."""
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from error
    try:
        yield file
    finally:
        try:
            file.close()
        except OSError as error:
            raise cannot_write(error) from error
