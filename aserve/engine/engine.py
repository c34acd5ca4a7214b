"""The engine as a program sees it, and its life as a scope: ``async with run_engine(...) as engine``.

Owns the step thread from start to join, and everything on the event loop's side of it. Knows models only as a factory
of a StepExecutor. Opened by ``aserve.assembly``; used by the server and by embedding programs.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Unpack

import anyio

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig
from aserve.core.errors import AserveError, EngineDrainingError
from aserve.core.grammar import Grammar
from aserve.core.pooling import Abilities, Task
from aserve.core.request import GenerationRequest
from aserve.core.step import StepExecutor
from aserve.engine import admission
from aserve.engine.bridge import EventRouter, StepHost, ThreadHost
from aserve.engine.embedding import Input, as_inputs, pooled_request, prompt_text, require, vector_params
from aserve.engine.generation import Generation, RequestGroup
from aserve.engine.grammars import CompilesGrammars, Grammars
from aserve.engine.lifecycle import Lifecycle, Status
from aserve.engine.local_client import LocalClient
from aserve.engine.messages import Stop
from aserve.engine.new_scheduler import make_scheduler
from aserve.engine.options import GenerationOptions, as_token_ids, check_options, make_request
from aserve.engine.pooled import PooledPrompt
from aserve.engine.prompts import PromptEncoder
from aserve.engine.stats import EngineStats, StatsRecorder
from aserve.engine.step_loop import run_steps
from aserve.engine.streams import ChatStream
from aserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

RETRY_AFTER_DRAIN_S = 10.0


class Engine:
    """One model, ready to generate. Made by ``run_engine``; every method belongs to its event loop.

    Attributes:
        capacity: what the executor can hold.
        tokenizer: the model's.
        model_names: the names under which clients may ask for the model, at least one.
        vocab_size: token ids that tokenizer and model both know lie in [0, vocab_size).
        end_token_ids: the model's end-of-text ids, as far as it can emit them.
        abilities: what the model can be asked for.
        encoder: makes token ids of prompts, in worker threads.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        model_names: tuple[str, ...],
        capacity: Capacity,
        client: LocalClient,
        router: EventRouter,
        lifecycle: Lifecycle,
        recorder: StatsRecorder,
        abilities: Abilities,
    ) -> None:
        self.abilities = abilities
        self.tokenizer = tokenizer
        self.model_names = model_names
        self.capacity = capacity
        self.vocab_size = _vocab_size(tokenizer, capacity)
        self.end_token_ids = tuple(i for i in tokenizer.stop_token_ids if i < self.vocab_size)
        self._client = client
        self._router = router
        self._lifecycle = lifecycle
        self._recorder = recorder
        self.encoder = PromptEncoder(tokenizer, capacity)
        self._id_prefix = secrets.token_hex(4)
        self._ids = count()

    # -- its state ---------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """``running``, ``draining`` (nothing new is admitted), ``closed`` (left) or ``dead`` (the step loop failed)."""
        return self._lifecycle.status

    def refuse_unless_running(self) -> None:
        """Raise what entering a generation would raise now: EngineDrainingError, EngineDeadError, or nothing."""
        self._lifecycle.refuse_unless_running()

    @property
    def max_sequences(self) -> int:
        """How many sequences fit at most, running and waiting; a request for more can never be admitted."""
        return self._client.max_sequences

    @property
    def failure(self) -> BaseException | None:
        """What killed the step loop."""
        return self._lifecycle.failure

    async def wait_dead(self) -> None:
        """Wait until the step loop has failed; for ever, if it does not."""
        await self._lifecycle.wait_dead()

    def start_draining(self, retry_after_s: float = RETRY_AFTER_DRAIN_S) -> None:
        """Admit nothing new from now on; what runs goes on. Idempotent."""
        self._lifecycle.start_draining(retry_after_s)

    async def wait_idle(self) -> None:
        """Wait until every request has finished or left, and the scheduler holds nothing any more."""
        while not self._client.is_idle:
            await self._router.wait_report()

    def close_all(self, make_error: Callable[[], AserveError]) -> None:
        """Close every generation that still waits for tokens, each with an error of its own; what waits wakes up.

        Synchronous and idempotent. The readers leave and so cancel; ``wait_idle`` waits for that. An answer whose
        tokens have all come stays readable. Nothing is refused by this: see ``start_draining``.
        """
        self._router.close_mailboxes(make_error)

    def stalled(self, after_s: float) -> bool:
        """Whether there is work, commands that the step thread has not taken included, and no step for this long."""
        return not self._client.is_idle and anyio.current_time() - self._router.progress_s > after_s

    def stats(self) -> EngineStats:
        """The numbers of this moment."""
        report, recorder = self._router.report, self._recorder
        assert report is not None, "an engine is made after the first report"
        scheduler = report.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_used_blocks=scheduler.num_used_blocks,
            num_blocks=scheduler.num_blocks,
            num_requests=dict(recorder.num_requests),
            num_rejected=recorder.num_rejected,
            num_prompt_tokens=recorder.num_prompt_tokens,
            num_generated_tokens=recorder.num_generated_tokens,
            num_cancelled_tokens=recorder.num_cancelled_tokens,
            num_late_events=recorder.num_late_events,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_host_hits=scheduler.num_host_hits,
            num_restored_tokens=scheduler.num_restored_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=report.num_steps,
            busy_s=report.busy_s,
            wait_s=report.wait_s,
            last_step_age_s=anyio.current_time() - self._router.progress_s,
            time_to_first_token_s=recorder.time_to_first_token.snapshot(),
            inter_token_s=recorder.inter_token.snapshot(),
            queue_s=recorder.queue.snapshot(),
            end_to_end_s=recorder.end_to_end.snapshot(),
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> Generation:
        """A request as a scope; entering it submits. Its id must never have been used with this engine."""
        return Generation(request, client=self._client, tokenizer=self.tokenizer, recorder=self._recorder)

    def generate_all(self, requests: Sequence[GenerationRequest]) -> RequestGroup[Generation]:
        """Several requests as one scope, admitted as a unit or refused as one."""
        return RequestGroup([self.generate(request) for request in requests], self._client)

    def pool_all(self, requests: Sequence[GenerationRequest]) -> RequestGroup[PooledPrompt]:
        """Several prompts that are to become vectors, likewise."""
        prompts = [PooledPrompt(request, client=self._client, recorder=self._recorder) for request in requests]
        return RequestGroup(prompts, self._client)

    def require(self, task: Task) -> None:
        """Raise TaskNotOfferedError, which says what to use in place, unless the model can do this."""
        require(self.abilities, task)

    def preparing(self, num_sequences: int) -> AbstractContextManager[None]:
        """The time in which the prompts of so many sequences are made, when they wait like any others.

        Raises QueueFullError if they would not be admitted now, whatever their prompts, which spares the making.
        Admission decides again.
        """
        return self._client.preparing(num_sequences)

    def retry_after_s(self) -> float:
        """When what waits now will have run, by the rate at which requests end; whole seconds from 1 to 60."""
        return self._client.retry_after_s()

    def new_request_id(self) -> str:
        """An id that no other request of this engine has."""
        return f"{self._id_prefix}-{next(self._ids)}"

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, made in a worker thread.

        Raises ContextLengthError if no answer fits behind it (at once, if it is absurdly long), InvalidRequestError.
        """
        return await self.encoder.encode(text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: Sequence[Any], /, **template_options: Any) -> list[int]:
        """Token ids of a chat prompt by the model's template; raises as ``encode``, and what the template refuses."""
        return await self.encoder.encode_chat(messages, **template_options)

    async def compile_grammar(self, grammar: Grammar) -> object:
        """Have a grammar compiled in a thread, or find it; requests with it start at once while the result is held.

        Raises InvalidGrammarError and GrammarTimeoutError for what cannot be used, PromptError.
        """
        return await self._client.compile(grammar)

    def fit(self, num_prompt_tokens: int, max_tokens: int | None, *, param: str | None = None) -> int:
        """How many tokens an answer may have: ``max_tokens``, cut to the room that the prompt leaves.

        Raises ContextLengthError, naming ``param``, if the prompt leaves none.
        """
        return admission.fit(self.capacity, num_prompt_tokens, max_tokens, param=param)

    def make_request(
        self,
        options: Mapping[str, Any],
        *,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        request_id: str | None = None,
    ) -> GenerationRequest:
        """Build a request of checked ``GenerationOptions``; what they leave open is the model's, else the default.

        Args:
            max_tokens: as ``fit`` returned it.
            request_id: must never have been used with this engine; a new one by default.
        """
        return make_request(
            options,
            request_id=request_id or self.new_request_id(),
            prompt_token_ids=prompt_token_ids,
            max_tokens=max_tokens,
            end_token_ids=self.end_token_ids,
            defaults=self.tokenizer.generation_defaults,
        )

    def chat(
        self,
        messages: Sequence[Any],
        *,
        template_options: dict[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> ChatStream:
        """Answer a conversation in the OpenAI form. Raises InvalidRequestError for options; else nothing before use."""
        checked = check_options(options)
        encode = partial(self.encode_chat, messages, **(template_options or {}))
        return ChatStream(partial(self._prepare, encode, checked))

    def complete(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> ChatStream:
        """Continue a text, or token ids. Raises InvalidRequestError for options; else nothing before use."""
        checked = check_options(options)

        async def encode() -> list[int]:
            return await self.encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)

        return ChatStream(partial(self._prepare, encode, checked))

    async def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate: int | None = None,
    ) -> NDArray[np.float32]:
        """Return a vector for each input, [inputs, size], also for a single one.

        Args:
            inputs: a text, token ids, or several of these. Ids are taken as they are.
            dimensions: keep so many leading numbers, where the model is made for that.
            normalize: scale to length 1; default: as the model's makers do.
            prompt_name: which of the model's prompts goes before each text.
            truncate: cut inputs to so many tokens; longer ones are else refused.

        Raises InvalidRequestError, ContextLengthError, TaskNotOfferedError, and what entering a generation raises.
        """
        import numpy as np  # what only answers should not wait for it

        params = vector_params(self.abilities, dimensions=dimensions, normalize=normalize)
        prefix = prompt_text(self.abilities, prompt_name)
        prompts = [await self.encode_input(each, prefix=prefix, truncate=truncate) for each in as_inputs(inputs)]
        async with self.pool_all([pooled_request(self.new_request_id(), ids, params) for ids in prompts]) as pooled:
            vectors = [await each.vector() for each in pooled]
        return np.frombuffer(b"".join(vectors), "<f4").reshape(len(vectors), -1).astype(np.float32)

    async def encode_input(
        self,
        value: Input,
        *,
        prefix: str = "",
        add_special_tokens: bool = True,
        truncate: int | None = None,
        param: str = "input",
    ) -> list[int]:
        """Token ids of one input. Raises InvalidRequestError, ContextLengthError that names ``param``."""
        if not isinstance(value, str):
            ids = as_token_ids(value)[:truncate]
            admission.check_input(self.capacity, len(ids), param=param)
            return ids
        text = prefix + value
        ids, _ = await self.encoder.encode_input(
            (text.lower() if self.abilities.lowercase else text,),
            add_special_tokens=add_special_tokens,
            max_tokens=truncate,
            param=param,
        )
        return ids

    async def _prepare(self, encode: Callable[[], Any], options: dict[str, Any]) -> Generation:
        ids: list[int] = await encode()
        return self.generate(
            self.make_request(options, prompt_token_ids=ids, max_tokens=self.fit(len(ids), options.get("max_tokens")))
        )


def _vocab_size(tokenizer: Tokenizer, capacity: Capacity) -> int:
    # a tokenizer may have ids that the model has no embedding for, and the other way round
    return min(tokenizer.vocab_size, capacity.vocab_size)


@asynccontextmanager
async def run_engine(
    *,
    executor_factory: Callable[[], StepExecutor],
    tokenizer: Tokenizer,
    config: EngineConfig,
    model_names: tuple[str, ...],
    abilities: Abilities | None = None,
    join_timeout_s: float = 10.0,
    make_host: Callable[[], StepHost] = ThreadHost,
    grammars: CompilesGrammars | None = None,
) -> AsyncGenerator[Engine]:
    """Start the step thread, have it load the executor, and yield the engine when it is ready.

    On the way out every open generation is closed, the thread told to stop and joined. A thread that hangs is left
    behind after ``join_timeout_s``; one that is still loading is not waited for, it ends by itself when it has loaded.
    ``make_host`` says where the step loop runs, ``abilities`` what the model can be asked for; default: what any
    decoder can. ``grammars`` is the compiler that the executor has, too. Raises what ``executor_factory`` raised.
    """
    recorder, lifecycle, host = StatsRecorder(), Lifecycle(), make_host()
    commands = host.commands
    router = EventRouter(recorder, lifecycle.receive, on_fault=partial(commands.put, Stop()), call_soon=host.call_soon)
    grammar_pool = Grammars(grammars, timeout_s=config.grammar.grammar_timeout_s, call_soon=router.call_soon)
    new_scheduler = partial(make_scheduler, config)
    host.start(run_steps(executor_factory, new_scheduler, take=commands.take, publish=router.publish, clock=host.clock))
    try:
        capacity = await lifecycle.wait_started()
        client = LocalClient(
            commands=commands,
            router=router,
            lifecycle=lifecycle,
            recorder=recorder,
            capacity=capacity,
            vocab_size=_vocab_size(tokenizer, capacity),
            limits=admission.QueueLimits.of(config.scheduler, capacity),
            grammars=grammar_pool,
        )
        yield Engine(
            tokenizer=tokenizer,
            model_names=model_names,
            capacity=capacity,
            client=client,
            router=router,
            lifecycle=lifecycle,
            recorder=recorder,
            abilities=abilities or Abilities(),
        )
    finally:
        lifecycle.close()
        grammar_pool.close()
        commands.put(Stop())
        router.close_all(lambda: EngineDrainingError("the server is shutting down", retry_after_s=RETRY_AFTER_DRAIN_S))
        if lifecycle.has_started:
            with anyio.move_on_after(join_timeout_s, shield=True):
                await lifecycle.wait_stopped()
            if not (lifecycle.has_stopped and host.join(1.0)):
                logger.warning("the step thread did not end within %g s; it is left behind", join_timeout_s)
        router.close()
