"""``aserve chat``: a conversation in the terminal with an engine in this process.

The terminal is read on the main thread, where Ctrl-C arrives; the engine lives in an event loop on a thread of its
own. Ctrl-C while an answer streams leaves that answer's scope, which is what cancels it; the program goes on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aserve.cli.settings import ENGINE, ConfigFile, ShowConfig, engine_config, with_settings
from aserve.cli.sources import Sources
from aserve.core.errors import AserveError, EngineDeadError

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from aserve.engine.engine import Engine

HELP = "Ctrl-C stops an answer, Ctrl-D leaves, /new starts a new conversation."


def command(sources: Sources) -> Callable[..., int]:
    """The command, with one flag per setting of the engine."""

    @with_settings(*ENGINE)
    def chat(
        *,
        system: Annotated[str | None, Parameter(group="Sampling")] = None,
        max_tokens: Annotated[int | None, Parameter(group="Sampling")] = None,
        temperature: Annotated[float | None, Parameter(group="Sampling")] = None,
        top_p: Annotated[float | None, Parameter(group="Sampling")] = None,
        seed: Annotated[int | None, Parameter(group="Sampling")] = None,
        config: ConfigFile = None,
        show_config: ShowConfig = False,
        **values: Any,
    ) -> int:
        """Talk to a model in the terminal. Ctrl-C stops an answer, Ctrl-D leaves, /new starts a new conversation.

        Parameters
        ----------
        model
            A built-in name, a Hugging Face folder, a hub id, or a .gguf file.
        system
            System message of every conversation.
        max_tokens
            Longest answer in tokens; default: what the context leaves.
        temperature
            0 takes the most likely token; default: the model's own.
        top_p
            Sample from the most likely tokens with this much probability together; default: the model's own.
        seed
            Makes the answers repeatable.
        """
        settings = engine_config(values)
        options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        if show_config:
            print(sources.show(settings, own={"system": system, **options}))
            return 0
        from anyio.from_thread import start_blocking_portal

        from aserve.cli.launch import engine_opener

        given = {name: value for name, value in options.items() if value is not None}
        with (
            start_blocking_portal("trio") as portal,
            portal.wrap_async_context_manager(engine_opener()(settings)) as engine,
        ):
            Conversation(portal, engine, system, given).run()
        return 0

    return chat


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the loop of questions and answers."""

    portal: BlockingPortal
    engine: Engine
    system: str | None
    options: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def run(self) -> None:
        """Ask and answer until the end of the input. Raises EngineDeadError."""
        # a question that is no text fails as a question, and a terminal without a letter shows another one
        for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
            if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
                reconfigure(errors=errors)
        interactive = sys.stdin.isatty()
        if interactive:
            importlib.import_module("readline")  # gives input() line editing and history
            print(HELP, file=sys.stderr)
        self._start()
        while (question := self._read(">>> " if interactive else "")) is not None:
            if question == "/new":
                self._start()
            elif question:
                self._ask(question)

    def _start(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    @staticmethod
    def _read(prompt: str) -> str | None:
        while True:
            try:
                return input(prompt).strip()
            except EOFError:
                return None
            except KeyboardInterrupt:  # drops the line, as a shell does
                print(f"\n{HELP}", file=sys.stderr)

    def _ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        parts: list[str] = []
        answer = self.portal.start_task_soon(self._answer, parts)
        try:
            answer.result()
        except KeyboardInterrupt:
            answer.cancel()
        except EngineDeadError:
            raise
        except AserveError as error:
            self.messages.pop()
            print(f"aserve: error: {error.message}", file=sys.stderr)
            return
        print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(parts)})

    async def _answer(self, parts: list[str]) -> None:
        async with self.engine.chat(self.messages, **self.options) as stream:
            async for delta in stream:
                parts.append(delta.text)
                print(delta.text, end="", flush=True)
