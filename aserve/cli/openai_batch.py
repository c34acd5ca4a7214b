"""A file of OpenAI batch requests through the server's own application, so that a line means what a request does.

Lines are answered many at once and written as they end. The output is what makes a run restartable: whatever it has a
good answer for is not asked again. Used by ``run-batch``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import anyio
import anyio.to_thread

from aserve.cli.batch_files import cannot_write
from aserve.core.errors import EngineDeadError, InvalidRequestError
from aserve.server.asgi import ASGIApp
from aserve.server.in_memory import ask

WINDOW_STEPS = 2
"""Requests under way, in full steps: enough to keep the batch full."""


def answered(path: Path) -> set[str]:
    """The ``custom_id`` of each line of an earlier output that has a good answer. The other lines are taken out of it.

    A last line that an interrupted run has left unfinished is one of those. Nothing is lost if this is interrupted:
    the file is replaced as a whole. Raises OutputError.
    """
    if not path.exists():
        return set()
    done: set[str] = set()
    kept = path.with_name(path.name + ".part")
    try:
        with path.open("rb") as before, kept.open("wb") as after:
            for line in before:
                custom_id = _answered_id(line)
                if custom_id is not None and custom_id not in done:
                    done.add(custom_id)
                    after.write(line)
        os.replace(kept, path)
    except OSError as error:
        raise cannot_write(error) from error
    return done


def _answered_id(line: bytes) -> str | None:
    if not line.endswith(b"\n"):
        return None
    try:
        result = json.loads(line)
        good = result["response"]["status_code"] == 200
        return result["custom_id"] if good and isinstance(result["custom_id"], str) else None
    except (ValueError, KeyError, TypeError):
        return None


class OpenAIBatch:
    """One run over a file.

    Args:
        app: Answers the requests.
        out: Gets one JSON object per request, in the order of their ends.
        done: Requests that are not to be asked.
        num_at_once: How many are under way.
        progress: Called after every line.

    Attributes:
        num_failed, num_skipped: lines without a good answer, and those that had one already.
    """

    def __init__(
        self, app: ASGIApp, out: TextIO, *, done: set[str], num_at_once: int, progress: Callable[[], None]
    ) -> None:
        self._app = app
        self._out = out
        self._done = done
        self._room = anyio.Semaphore(num_at_once)
        self._progress = progress
        self._seen: set[str] = set()
        self.num_lines = self.num_failed = self.num_skipped = 0

    async def run(self, lines: TextIO) -> None:
        """Answer all lines; blank ones are skipped. Raises EngineDeadError, OutputError."""
        async with anyio.create_task_group() as tasks:
            while line := await anyio.to_thread.run_sync(lines.readline, abandon_on_cancel=True):
                if line.strip():
                    await self._room.acquire()
                    tasks.start_soon(self._answer, self.num_lines, line)
                    self.num_lines += 1

    async def _answer(self, index: int, line: str) -> None:
        custom_id: str | None = None
        try:
            fields = _parse(line)
            custom_id = self._take_id(fields)
            if custom_id in self._done:
                self.num_skipped += 1
            else:
                await self._ask(index, custom_id, fields)
        except InvalidRequestError as error:
            self._write(index, custom_id, None, {"code": error.code, "message": error.message})
        self._room.release()
        self._progress()

    def _take_id(self, fields: dict[str, Any]) -> str:
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise InvalidRequestError("custom_id must be a text that names the line", param="custom_id")
        if custom_id in self._seen:
            raise InvalidRequestError(f"custom_id {custom_id!r} has been used by an earlier line", param="custom_id")
        self._seen.add(custom_id)
        return custom_id

    async def _ask(self, index: int, custom_id: str, fields: dict[str, Any]) -> None:
        url, body = _request_of(fields)
        request_id = f"batch-{index}"
        status, answer = await ask(self._app, url, json.dumps(body).encode(), [(b"x-request-id", request_id.encode())])
        if status == EngineDeadError.status and b'"engine_dead"' in answer:
            raise EngineDeadError("the engine has failed; what has been answered so far is in the output")
        response = {"status_code": status, "request_id": request_id, "body": json.loads(answer)}
        self._write(index, custom_id, response, None)

    def _write(
        self, index: int, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> None:
        self.num_failed += response is None or response["status_code"] != 200
        result = {"id": f"batch_req_{index}", "custom_id": custom_id, "response": response, "error": error}
        try:
            self._out.write(json.dumps(result) + "\n")
            self._out.flush()
        except OSError as failure:
            raise cannot_write(failure) from failure


def _parse(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidRequestError(f"the line is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("the line is not a JSON object")
    return cast("dict[str, Any]", fields)


def _request_of(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path and the body. Raises InvalidRequestError for what no batch can have."""
    if fields.get("method", "POST") != "POST":
        raise InvalidRequestError("method must be POST", param="method")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or not url.startswith("/"):
        raise InvalidRequestError("url must be a path such as /v1/chat/completions", param="url")
    if not isinstance(body, dict):
        raise InvalidRequestError("body must be a JSON object", param="body")
    body = cast("dict[str, Any]", body)
    if body.get("stream"):
        raise InvalidRequestError("an answer in a file cannot be streamed", param="body.stream")
    unknown = fields.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        raise InvalidRequestError(f"{min(unknown)} is not a field of a line", param=min(unknown))
    return url, body
