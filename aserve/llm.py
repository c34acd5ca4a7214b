"""``LLM``: a model in a program that knows no async and no server. Batches in, answers out.

The engine and its event loop live in a thread of their own; every call is a scope in that loop, and Ctrl-C in the
caller ends the scope, so nothing goes on being generated. Programs with an event loop open the engine itself
(``open_engine``), whose requests this hands over; ``answer_all`` is the batch for them.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

import anyio
from anyio.from_thread import BlockingPortal

from aserve.assembly import open_engine
from aserve.core.capacity import Capacity
from aserve.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from aserve.core.errors import AserveError
from aserve.engine.embedding import Input, as_inputs
from aserve.engine.engine import Engine
from aserve.engine.options import GenerationOptions
from aserve.engine.stats import EngineStats
from aserve.engine.streams import ChatStream, Completion

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
Message = Mapping[str, Any]
Answer = tuple[Completion, ...]
Prompt = str | Sequence[int]

_WINDOW_STEPS = 4  # requests under way, in full steps: enough to keep the batch full
_VECTOR_STEPS = 32  # inputs handed over at once, in full steps: only the last of so many is not full
_UNLIMITED = 2**31  # the batch limits itself
_JOIN_S = 15.0


async def answer_all(
    engine: Engine,
    streams: Sequence[Callable[[], ChatStream]],
    *,
    on_answer: Callable[[Answer], object] = lambda _: None,
    return_exceptions: bool = False,
) -> list[Answer | AserveError]:
    """Run many requests, as many at once as keep the engine busy; the answers are in the order of the requests.

    Args:
        streams: each makes one request, such as ``partial(engine.complete, "a prompt", max_tokens=5)``.
        on_answer: told of each answer when it is there.
        return_exceptions: a request that fails has its error in its answer's place. Otherwise the first error ends
            the others and is raised.
    """
    made = [stream() for stream in streams]  # here, so that an option which does not exist raises as it is
    answers: list[Answer | AserveError | None] = [None] * len(streams)
    room = anyio.Semaphore(_WINDOW_STEPS * engine.capacity.max_num_seqs)
    failure: AserveError | None = None
    async with anyio.create_task_group() as tasks:

        async def answer(index: int) -> None:
            nonlocal failure
            try:
                async with made[index] as stream:
                    got = answers[index] = await stream.collect()
                on_answer(got)
            except AserveError as error:
                if return_exceptions:
                    answers[index] = error
                elif failure is None:
                    failure = error
                    tasks.cancel_scope.cancel()
            room.release()

        for index in range(len(made)):
            await room.acquire()
            tasks.start_soon(answer, index)
    if failure is not None:
        raise failure
    return cast("list[Answer | AserveError]", answers)


class LLM:
    """A loaded model. Close it, or use it as a context manager; one that is open when the program ends is closed then.

    Methods may be called from several threads at once: all their requests share the batch.

    Args:
        model: a built-in name, a folder, a hub id or a ``.gguf`` file; or a whole configuration.
        cache_dir: where converted and downloaded models are kept; default ``~/.cache/aserve``.
        offline: never ask a hub.
        settings: fields of ``ModelConfig``, ``CacheConfig`` and ``SchedulerConfig`` by name, such as ``max_model_len``.

    Raises:
        ConfigError: settings contradict each other, the model or the machine.
        ModelLoadError: the model is missing, damaged or of an unknown kind.
        TypeError: a setting that does not exist.
    """

    def __init__(
        self, model: str | EngineConfig, *, cache_dir: Path | None = None, offline: bool = False, **settings: Any
    ) -> None:
        config = _config(model, settings)
        self._loop = _LoopThread()
        try:
            opening = partial(open_engine, config, cache_dir=cache_dir, offline=offline)
            self._engine = self._loop.open(opening)
        except BaseException:
            self._loop.close()
            raise
        atexit.register(self.close)  # after the engine's own, so that it comes before it: that one only waits

    @property
    def capacity(self) -> Capacity:
        """What the model's KV cache holds, and what its memory is used for."""
        return self._engine.capacity

    def stats(self) -> EngineStats:
        """The engine's numbers now."""

        async def read() -> EngineStats:
            return self._engine.stats()

        return self._loop.call(read)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        *,
        progress: bool = True,
        return_exceptions: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Answer | list[Answer | AserveError]:
        """Continue one text, or each of several texts or lists of token ids.

        Returns the choices of each, in order. ``progress`` shows a bar where stderr is a terminal.
        Raises InvalidRequestError, ContextLengthError, GenerationError, EngineDeadError.
        """
        if isinstance(prompts, str):
            return self._one(partial(self._engine.complete, prompts, **options))
        streams = [partial(self._engine.complete, prompt, **options) for prompt in prompts]
        return self._many(streams, progress=progress, return_exceptions=return_exceptions)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        progress: bool = True,
        return_exceptions: bool = False,
        template_options: dict[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Answer | list[Answer | AserveError]:
        """Answer one conversation, which is a list of messages in the OpenAI form, or each of several.

        Returns and raises what ``generate`` does.
        """
        ask = partial(self._engine.chat, template_options=template_options, **options)
        if conversations and isinstance(conversations[0], Mapping):
            return self._one(partial(ask, cast("Sequence[Message]", conversations)))
        streams = [partial(ask, messages) for messages in cast("Sequence[Sequence[Message]]", conversations)]
        return self._many(streams, progress=progress, return_exceptions=return_exceptions)

    def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        progress: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate: int | None = None,
    ) -> NDArray[np.float32]:
        """Return a vector for each text or list of token ids, [inputs, size]; the options are ``Engine.embed``'s.

        Raises InvalidRequestError, ContextLengthError, TaskNotOfferedError, GenerationError, EngineDeadError.
        """
        import numpy as np  # what only answers should not wait for it

        embed = partial(
            self._engine.embed, dimensions=dimensions, normalize=normalize, prompt_name=prompt_name, truncate=truncate
        )
        wanted = as_inputs(inputs)
        size = _VECTOR_STEPS * self.capacity.max_num_seqs
        parts: list[NDArray[np.float32]] = []
        with _plain_bar(len(wanted)) if progress else nullcontext(lambda _: None) as advance:
            for start in range(0, len(wanted), size):
                part = wanted[start : start + size]
                parts.append(self._loop.call(partial(embed, part)))
                advance(len(part))
        return np.concatenate(parts)

    def _one(self, stream: Callable[[], ChatStream]) -> Answer:
        (answer,) = self._loop.call(partial(answer_all, self._engine, [stream]))
        return cast("Answer", answer)

    def _many(
        self, streams: Sequence[Callable[[], ChatStream]], *, progress: bool, return_exceptions: bool
    ) -> list[Answer | AserveError]:
        with _bar(len(streams)) if progress else nullcontext(lambda _: None) as on_answer:
            return self._loop.call(
                partial(answer_all, self._engine, streams, on_answer=on_answer, return_exceptions=return_exceptions)
            )

    def close(self) -> None:
        """Cancel what runs and free the model. Idempotent."""
        atexit.unregister(self.close)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _LoopThread:
    """An event loop in a daemon thread. One that nobody closes does not keep the program from ending."""

    def __init__(self) -> None:
        self._portal: Future[BlockingPortal] = Future()
        self._stack: Any = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="aserve-llm", daemon=True)
        self._thread.start()

    def open(self, opening: Callable[[], Any]) -> Any:
        """Enter an asynchronous context manager for as long as the loop is open."""
        manager = self._portal.result().wrap_async_context_manager(opening())
        opened = manager.__enter__()
        self._stack = manager
        return opened

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the loop and wait for it. Whatever interrupts the waiting cancels it, and waits on."""
        if self._closed:
            raise RuntimeError("the model has been closed")
        future = self._portal.result().start_task_soon(function)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        portal = self._portal.result()
        try:
            if self._stack is not None:
                self._stack.__exit__(None, None, None)
        finally:
            portal.start_task_soon(portal.stop, True)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend="trio")
        except BaseException as error:  # told to whoever waits for the portal, if anybody still does
            if not self._portal.done():
                self._portal.set_exception(error)

    async def _main(self) -> None:
        async with BlockingPortal() as portal:
            self._portal.set_result(portal)
            await portal.sleep_until_stopped()


def _config(model: str | EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    if isinstance(model, EngineConfig):
        if settings:
            raise TypeError(f"a whole configuration takes no further settings such as {next(iter(settings))!r}")
        return model
    left = {"model": model, "max_queue": _UNLIMITED, **settings}

    def take(kind: type[T]) -> T:
        return kind(**{field.name: left.pop(field.name) for field in fields(cast("Any", kind)) if field.name in left})

    config = EngineConfig(model=take(ModelConfig), cache=take(CacheConfig), scheduler=take(SchedulerConfig))
    if left:
        raise TypeError(f"{next(iter(left))!r} is no setting of an engine")
    return config


def _plain_bar(total: int) -> AbstractContextManager[Callable[[int], object]]:
    from contextlib import contextmanager

    from tqdm import tqdm

    @contextmanager
    def shown() -> Any:
        with tqdm(total=total, unit=" inputs", disable=None) as bar:
            yield bar.update

    return shown()


def _bar(total: int) -> AbstractContextManager[Callable[[Answer], object]]:
    from contextlib import contextmanager

    from tqdm import tqdm

    @contextmanager
    def shown() -> Any:
        num_tokens = 0
        with tqdm(total=total, unit=" prompts", disable=None) as bar:

            def on_answer(answer: Answer) -> None:
                nonlocal num_tokens
                num_tokens += sum(len(choice.token_ids) for choice in answer)
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                bar.update()

            yield on_answer

    return shown()
