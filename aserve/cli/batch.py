"""A batch of JSON lines through an engine: many at once, written in the order in which they came.

Reads no further than a window ahead of what is written, so a file of any length takes little memory. A line's mistake
ends that line; the engine's death ends the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import anyio
import anyio.to_thread

from aserve.cli.batch_files import cannot_write
from aserve.cli.batch_line import parse_line, take_line
from aserve.core.errors import AserveError, EngineDeadError

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

WINDOW_STEPS = 4
"""Lines read ahead, in full steps: enough to keep the batch full while one long answer holds the output back."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How a batch went."""

    num_lines: int
    num_failed: int


class Batch:
    """One run over a file of JSON lines.

    Args:
        out: Gets one JSON object per input line.
        defaults: Sampling options of lines that do not set them.
        progress: Called after every line.
    """

    def __init__(self, engine: Engine, out: TextIO, defaults: Mapping[str, Any], progress: Callable[[], None]) -> None:
        self._engine = engine
        self._out = out
        self._defaults = defaults
        self._progress = progress
        self._room = anyio.Semaphore(WINDOW_STEPS * engine.capacity.max_num_seqs)
        self._done: dict[int, dict[str, Any]] = {}
        self._num_written = 0
        self._num_failed = 0

    async def run(self, lines: TextIO) -> Counts:
        """Answer all lines; blank ones are skipped. Raises EngineDeadError, AserveError if nothing can be written."""
        index = 0
        async with anyio.create_task_group() as tasks:
            while line := await anyio.to_thread.run_sync(lines.readline, abandon_on_cancel=True):
                if line.strip():
                    await self._room.acquire()
                    tasks.start_soon(self._answer, index, line)
                    index += 1
        return Counts(index, self._num_failed)

    async def _answer(self, index: int, line: str) -> None:
        result: dict[str, Any] = {"index": index}
        try:
            fields = parse_line(line)
            if "id" in fields:
                result["id"] = fields.pop("id")
            result |= await self._generate({**self._defaults, **fields})
        except EngineDeadError:
            raise
        except AserveError as error:
            self._num_failed += 1
            result["error"] = {
                "message": error.message, "type": error.type, "code": error.code, "param": error.param
            }  # fmt: skip
        self._done[index] = result
        self._write()

    async def _generate(self, fields: dict[str, Any]) -> dict[str, Any]:
        messages, prompt, options = take_line(fields)
        stream = self._engine.chat(messages, **options) if messages else self._engine.complete(prompt, **options)
        async with stream:
            (completion,) = await stream.collect()
            generation = stream.generation
        return {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "usage": {
                "prompt_tokens": generation.num_prompt_tokens,
                "completion_tokens": generation.num_completion_tokens,
            },
        }

    def _write(self) -> None:
        """Write what is complete, in order; nothing awaits here, so two answers cannot interleave."""
        try:
            while (result := self._done.pop(self._num_written, None)) is not None:
                self._out.write(_to_json(result) + "\n")
                self._num_written += 1
                self._room.release()
                self._progress()
            self._out.flush()
        except OSError as error:
            raise cannot_write(error) from error


def _to_json(result: dict[str, Any]) -> str:
    text = json.dumps(result, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an id with half of a surrogate pair, which only an escape can give back
        return json.dumps(result)
    return text
