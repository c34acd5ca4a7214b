"""What clients do: over HTTP, and as tasks of a program that embeds the engine. Each judges what it got.

Called by the world, one task per client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from aserve.core.errors import (
    AserveError,
    EngineDeadError,
    EngineDrainingError,
    GenerationClosedError,
    GenerationError,
    InvalidRequestError,
    QueueFullError,
)
from aserve.core.request import GenerationRequest, SamplingParams, TextDelta
from tests.simulation.asks import CHAT, Ask
from tests.simulation.connection import Connection
from tests.simulation.model import BOS, EOS
from tests.simulation.verdict import Times, judge, judge_deltas, judge_refusal

if TYPE_CHECKING:
    from aserve.engine.engine import Engine
    from aserve.engine.generation import Generation
    from tests.simulation.world import World


async def run_client(world: World, ask: Ask) -> None:
    """One client's whole life."""
    await trio.sleep_until(ask.at_s)
    world.observer.open_requests.add(ask.index)
    world.log("asks", ask.index, ask.via, ask.manner)
    if ask.via == "http":
        await _over_http(world, ask)
    elif ask.via == "probe":
        world.observer.look_at_health()
    else:
        await _embedded(world, ask)
    world.observer.open_requests.discard(ask.index)
    world.log("ended", ask.index)
    world.observer.look_at_health()


async def _over_http(world: World, ask: Ask) -> None:
    connection = Connection(world, ask)
    times = Times(opened_s=trio.current_time())
    server = world.server
    if server is None or not server.open(connection, _scope(ask)):
        world.log("refused", ask.index)
        return
    world.num_served += 1
    for number, part in enumerate(ask.parts, start=1):
        if number > 1:
            await trio.sleep(ask.part_s)
        connection.feed(part, more=number < len(ask.parts) or ask.manner == "half body")
    times.asked_s = trio.current_time()
    if ask.manner == "leaves" or ask.way == "leaves":
        with trio.move_on_after(ask.leaves_s):
            await connection.ended.wait()
        if not connection.ended.is_set():
            connection.leave()
    await connection.ended.wait()
    times.ended_s = trio.current_time()
    if not world.is_over:
        judge(world, ask, connection, times)


def _scope(ask: Ask) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": ask.path,
        "raw_path": ask.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*ask.headers, (b"x-request-id", b"%d" % ask.index)],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }


async def _embedded(world: World, ask: Ask) -> None:
    engine = world.engine
    if engine is None:
        world.log("no engine", ask.index)
        return
    times = Times(opened_s=trio.current_time(), asked_s=trio.current_time())
    deltas: list[TextDelta] = []
    error: AserveError | None = None
    complete = False
    try:
        with trio.move_on_after(ask.leaves_s if ask.way == "cancel" else float("inf")) as limit:
            read = _read_stream if ask.via == "stream" else _read_generation
            complete = await read(world, engine, ask, deltas)
        world.expect(limit.cancelled_caught or complete or ask.way in ("break", "close"), "an answer without an end")
    except (QueueFullError, EngineDrainingError, EngineDeadError, GenerationError, InvalidRequestError) as caught:
        error = caught
    except GenerationClosedError as caught:
        world.expect(ask.way == "close", f"request {ask.index} was closed by nobody: {caught}")
    times.ended_s = trio.current_time()
    judge_deltas(world, ask, deltas, complete=complete)
    if error is not None:
        judge_refusal(world, ask, times, status=error.status, code=str(error.code), started_s=times.ended_s)


async def _read_stream(world: World, engine: Engine, ask: Ask, deltas: list[TextDelta]) -> bool:
    """Through ``engine.chat`` and ``complete``; a loop that is left early must not leave anything running."""
    names = ("max_tokens", "n", "seed", "stop", "ignore_eos", "priority")
    options: dict[str, Any] = {name: ask.fields[name] for name in names if name in ask.fields}
    if ask.path == CHAT:
        stream = engine.chat(ask.fields["messages"], **options)
    else:
        stream = engine.complete(ask.fields["prompt"], **options)
    count = int(ask.leaves_s * 20)
    async for delta in stream:
        deltas.append(delta)
        if ask.way == "break" and len(deltas) > count:
            return False
        if ask.way == "close" and len(deltas) > count:
            stream.generation.close(GenerationClosedError("the program has lost interest"))
    return True


async def _read_generation(world: World, engine: Engine, ask: Ask, deltas: list[TextDelta]) -> bool:
    """Through ``engine.generate``, as a scope; closed, if at all, by another task."""
    fields = ask.fields
    prompt = (BOS, *fields["prompt"].encode())
    request = GenerationRequest(
        request_id=engine.new_request_id(),
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=min(fields["max_tokens"], engine.capacity.max_new_tokens(len(prompt))),
            seed=fields["seed"],
            stop_token_ids=() if fields.get("ignore_eos") else (EOS,),
        ),
        n=fields["n"],
        stop=tuple(fields.get("stop", ())),
        priority=fields["priority"],
    )
    error: AserveError | None = None
    complete = False
    async with trio.open_nursery() as nursery:
        try:
            async with engine.generate(request) as generation:
                if ask.way == "close":
                    nursery.start_soon(_close_later, generation, ask.leaves_s)
                complete = await _read(generation, deltas, int(ask.leaves_s * 20) if ask.way == "break" else None)
        except AserveError as caught:  # bare: the nursery would make a group of it
            error = caught
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return complete


async def _read(generation: Generation, deltas: list[TextDelta], count: int | None) -> bool:
    """Read to the end, or so many deltas and one; True at the end."""
    async for delta in generation:
        deltas.append(delta)
        if count is not None and len(deltas) > count:
            return False
    return True


async def _close_later(generation: Generation, seconds: float) -> None:
    await trio.sleep(seconds)
    generation.close(GenerationClosedError("another task has lost interest"))
