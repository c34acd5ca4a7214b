"""Whether a client got what it had to get: one answer, the right one, and an error only for a reason that exists.

Every refusal and every error event has to be explained by something that the scenario did before it. Called by the
clients at the end of each request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aserve.core.request import TextDelta
from tests.simulation.asks import Ask

if TYPE_CHECKING:
    from tests.simulation.connection import Connection
    from tests.simulation.world import World

SLACK_S = 0.5
"""What waking up, threads and delivery may take."""
GRACE_S = 1.0
STATUSES = MappingProxyType(
    {
        "engine_dead": 503,
        "engine_draining": 503,
        "engine_loading": 503,
        "queue_full": 503,
        "queue_timeout": 503,
        "concurrency_limit_exceeded": 429,
        "deadline_exceeded": 504,
        "idle_timeout": 504,
        "request_timeout": 408,
        "generation_failed": 500,
    }
)
MAY_RETRY = frozenset({"queue_full", "queue_timeout", "concurrency_limit_exceeded", "engine_loading"})
SEND_S = 30.0


@dataclass(slots=True)
class Times:
    """Of one request: connected, body sent, over; and when the last of its events were given to one that reads."""

    opened_s: float
    asked_s: float = math.inf
    ended_s: float = math.inf
    last_data_s: float = -math.inf


@dataclass(slots=True)
class Answer:
    """What a body says. ``code`` is that of an error; ``done`` means that it ends as a good answer ends."""

    code: str | None = None
    done: bool = False
    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    faults: list[str] = field(default_factory=list)


def judge(world: World, ask: Ask, connection: Connection, times: Times) -> None:
    """Judge an HTTP exchange whose application has returned."""
    where = f"request {ask.index} ({ask.manner}, {connection.status})"
    absent = connection.gone_s is not None or connection.stuck_s is not None
    _judge_times(world, ask, connection, times, where)
    if not connection.complete:
        world.expect(absent or connection.forced or world.was_stopped, f"{where}: the answer has no end")
    if connection.status == 0 or (connection.status != 200 and not connection.complete):
        return
    answer = _read(connection, ask)
    for fault in answer.faults:
        world.expect(False, f"{where}: {fault}")
    _judge_texts(world, ask, answer, where)
    if connection.complete:
        world.expect(answer.done != (answer.code is not None), f"{where}: neither an end nor an error, or both")
    if answer.done:
        _judge_success(world, ask, answer, where)
    elif answer.code is not None:
        started_s = times.ended_s if connection.started_s is None else connection.started_s
        if ask.manner != "slow" and ask.num_prompts == 1:  # parts that wait for one another are older than they look,
            times.last_data_s = connection.last_data_s  # and prompts are silent each for itself
        judge_refusal(
            world,
            ask,
            times,
            status=connection.status,
            code=answer.code,
            started_s=times.ended_s if connection.status == 200 else started_s,
            in_stream=connection.status == 200,
            absent=absent,
        )
        if connection.status != 200:
            _judge_retry(world, connection, answer.code, where)


def judge_deltas(world: World, ask: Ask, deltas: Iterable[TextDelta], *, complete: bool) -> None:
    """Judge what an embedding program has read."""
    answer = Answer()
    for delta in deltas:
        reason = None if delta.finish_reason is None else delta.finish_reason.value
        _add(answer, delta.choice, delta.text, reason)
    for fault in answer.faults:
        world.expect(False, f"request {ask.index}: {fault}")
    _judge_texts(world, ask, answer, f"request {ask.index}")
    if complete:
        _judge_success(world, ask, answer, f"request {ask.index}")


def judge_refusal(
    world: World,
    ask: Ask,
    times: Times,
    *,
    status: int,
    code: str,
    started_s: float,
    in_stream: bool = False,
    absent: bool = False,
) -> None:
    """Judge an error: its reason must exist, and must have existed when it was said."""
    world.log("error", ask.index, status, code)
    stopping_s = math.inf if world.stopping_s is None else world.stopping_s
    early = times.asked_s + SLACK_S + world.paused_s < stopping_s
    waited_s = times.ended_s - times.opened_s
    server = world.scenario.server
    too_many = len(ask.expected) > world.most_sequences
    timed_out = times.ended_s >= times.opened_s + world.scenario.server.read_timeout_s
    queue_s = _limit_s(ask, b"x-queue-timeout", server.queue_timeout_s)
    idle_s = _limit_s(ask, b"x-idle-timeout", server.idle_timeout_s)
    keepalive_s = server.sse_keepalive_s or math.inf
    # begun or not, or with the first choice's tokens, or when timers ran out together
    early_headers = keepalive_s < queue_s or len(ask.expected) > 1 or world.paused_s > 0
    reasons = {
        "engine_loading": world.loaded_s is None or times.opened_s <= world.loaded_s or world.stopping_s is not None,
        "engine_dead": world.failed_s is not None and world.failed_s <= started_s,
        "engine_draining": started_s >= (world.drain_limit_s if early else stopping_s),
        "queue_full": (world.is_busy(started_s - SLACK_S) or ask.num_prompts > 1) and not in_stream,
        "generation_failed": ask.fails,
        "deadline_exceeded": waited_s >= _limit_s(ask, b"x-request-timeout", server.request_timeout_s),
        "queue_timeout": times.ended_s >= times.asked_s + queue_s and (not in_stream or early_headers),
        "idle_timeout": times.ended_s >= max(times.asked_s, times.last_data_s) + idle_s,
        "concurrency_limit_exceeded": server.max_requests_per_key is not None and not in_stream,
        "request_timeout": (ask.manner == "half body" or bool(world.paused_s) or ask.part_s > 0) and timed_out,
        "request_cancelled": absent,
        "invalid_value": (ask.refused == 400 or too_many) and status == 400,
        "model_not_found": ask.refused == 404 and status == 404,
        "unsupported_media_type": ask.refused == 415 and status == 415,
        "request_too_large": ask.refused == 413 and status == 413,
    }
    where = f"request {ask.index} ({ask.via}, {ask.manner})"
    world.expect(reasons.get(code, False), f"{where}: {status} {code} for no reason")
    wanted = STATUSES.get(code, status)
    world.expect(in_stream or status == wanted, f"{where}: {code} with status {status}")


def _judge_retry(world: World, connection: Connection, code: str, where: str) -> None:
    """Who may come back is told when, in whole seconds, and nobody else is."""
    text = connection.headers.get(b"retry-after")
    if code == "engine_draining" and text is None:  # of an engine that is closed, not draining: nothing comes back
        return
    if code in MAY_RETRY or code == "engine_draining":
        world.expect(text is not None and text.isdigit() and 1 <= int(text) <= 60, f"{where}: {code}, back in {text!r}")
    else:
        world.expect(text is None, f"{where}: {code} is not to be tried again, and says {text!r}")


def _limit_s(ask: Ask, header: bytes, default_s: float | None) -> float:
    """A time limit: the header's or the server's, whichever is shorter."""
    limits = [float(value) for name, value in ask.headers if name == header]
    return min([*limits, math.inf if default_s is None else default_s])


def _judge_times(world: World, ask: Ask, connection: Connection, times: Times, where: str) -> None:
    """Who has left, is stuck or is out of time holds nothing for long."""
    slack_s = SLACK_S + world.paused_s
    if connection.gone_s is not None:
        late = times.ended_s - connection.gone_s - GRACE_S - slack_s
        world.expect(late <= 0, f"{where}: runs on for {late:.3f} s too long after its client has left")
    elif connection.stuck_s is not None:
        limit_s = max(SEND_S, 1.5 * world.scenario.server.stall_timeout_s + GRACE_S)
        late = times.ended_s - connection.stuck_s - limit_s - slack_s - 2 * ask.send_s
        world.expect(late <= 0, f"{where}: runs on for {late:.3f} s too long with a client that is stuck")
    elif ask.refused is None and ask.manner != "half body":
        if connection.status == STATUSES["queue_timeout"] and b"queue_timeout" in connection.body:
            limit_s = _limit_s(ask, b"x-queue-timeout", world.scenario.server.queue_timeout_s)
            late = times.ended_s - times.asked_s - limit_s - slack_s - 2 * ask.send_s
            world.expect(late <= 0, f"{where}: waits on for {late:.3f} s after it was to begin")
        limit_s = _limit_s(ask, b"x-request-timeout", world.scenario.server.request_timeout_s)
        late = times.ended_s - times.asked_s - limit_s - slack_s - 5 * ask.send_s
        world.expect(late <= 0, f"{where}: runs on for {late:.3f} s after its deadline")


def _judge_texts(world: World, ask: Ask, answer: Answer, where: str) -> None:
    """Whatever came is the beginning of what an isolated run gives."""
    for index, text in answer.texts.items():
        if not 0 <= index < len(ask.expected):
            world.expect(False, f"{where}: choice {index} was not asked for")
            return
        wanted = ask.expected[index]
        finish = answer.finish.get(index)
        same = wanted.text.startswith(text) if finish is None else (wanted.text, wanted.finish) == (text, finish)
        world.expect(same, f"{where}: choice {index} says {text!r} {finish}, alone it says {wanted}")


def _judge_success(world: World, ask: Ask, answer: Answer, where: str) -> None:
    wrong = ask.refused is not None or ask.fails
    world.expect(not wrong, f"{where}: answered, though it cannot be")
    world.expect(len(answer.finish) == len(ask.expected), f"{where}: choices {sorted(answer.finish)} have ended")
    if answer.usage is not None:
        wanted = sum(choice.num_tokens for choice in ask.expected)
        counted = answer.usage["completion_tokens"]
        world.expect(counted == wanted, f"{where}: {counted} tokens counted, alone {wanted}")


def _read(connection: Connection, ask: Ask) -> Answer:
    answer = Answer()
    try:
        if connection.status == 200 and ask.stream:
            _read_events(connection.body, answer)
        elif connection.complete:
            _read_whole(json.loads(connection.body), answer)
    except (ValueError, KeyError) as error:
        answer.faults.append(f"the answer cannot be read: {error!r}")
    return answer


def _read_whole(value: dict[str, Any], answer: Answer) -> None:
    if "error" in value:
        answer.code = value["error"]["code"]
        return
    for choice in value["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        _add(answer, choice["index"], text, choice["finish_reason"])
    answer.usage, answer.done = value["usage"], True


def _read_events(body: bytes, answer: Answer) -> None:
    events = body.split(b"\n\n")
    if events.pop():
        answer.faults.append("the last event is not whole")
    for event in events:
        if event == b": keep-alive" and not answer.done and answer.code is None:
            continue
        if answer.done or answer.code is not None:
            answer.faults.append("an event after the last one")
        elif event == b"data: [DONE]":
            answer.done = True
        else:
            _read_chunk(json.loads(event.removeprefix(b"data: ")), answer)


def _read_chunk(chunk: dict[str, Any], answer: Answer) -> None:
    if "error" in chunk:
        answer.code = chunk["error"]["code"]
        return
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        _add(answer, choice["index"], text, choice["finish_reason"])


def _add(answer: Answer, index: int, text: str, finish: str | None) -> None:
    if index in answer.finish:
        answer.faults.append(f"choice {index} goes on after its end")
    answer.texts[index] = answer.texts.get(index, "") + text
    if finish is not None:
        answer.finish[index] = finish
