"""Has grammars compiled while the event loop and the step thread go on, within a time limit each.

Compiling happens in threads of its own, so a slow grammar delays neither a token nor a prompt, and other grammars only
when all of these threads have slow ones. Used by the local client; made within the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import anyio

from aserve.core.errors import AserveError, GrammarTimeoutError, PromptError, UnsupportedFieldError
from aserve.core.grammar import Grammar
from aserve.engine.grammar_threads import GrammarThreads
from aserve.engine.limits import check_grammar

logger = logging.getLogger(__name__)

_NUM_THREADS = 4


class CompilesGrammars(Protocol):
    """The part of ``aserve.grammar.GrammarCompiler`` that is called here."""

    def find(self, grammar: Grammar) -> object | None: ...

    def warm_up(self) -> None: ...

    def compile(self, grammar: Grammar) -> object: ...


class _Compile:
    """One grammar on its way; written by its thread, read on the loop after the event that tells of it."""

    def __init__(self, compiler: CompilesGrammars, grammar: Grammar, call_soon: Callable[[Callable[[], object]], None]):
        self.begun = anyio.Event()
        self.done = anyio.Event()
        self.compiled: object | None = None
        self.error: AserveError | None = None
        self.is_wanted = True
        self._compiler = compiler
        self._grammar = grammar
        self._call_soon = call_soon

    def run(self) -> None:
        if not self.is_wanted:
            return
        try:
            self._compiler.warm_up()  # once, and no fault of the grammar's
            self._call_soon(self.begun.set)
            self.compiled = self._compiler.compile(self._grammar)
        except AserveError as error:
            self.error = error
        except BaseException as error:  # a panic in Rust is no Exception; nothing else ends this thread
            logger.error("a grammar could not be compiled", exc_info=error)
            self.error = PromptError("this grammar could not be compiled, by a fault of the server; others go on")
        self._call_soon(self.begun.set)
        self._call_soon(self.done.set)


class Grammars:
    """Compiles for one engine. Without a compiler every grammar is refused."""

    def __init__(
        self,
        compiler: CompilesGrammars | None,
        *,
        timeout_s: float,
        call_soon: Callable[[Callable[[], object]], None],
    ) -> None:
        """``call_soon`` runs something on the event loop, from any thread."""
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._call_soon = call_soon
        self._threads = GrammarThreads(_NUM_THREADS)

    async def compile(self, grammar: Grammar) -> object:
        """Return the compiled grammar, which the step thread finds for as long as somebody holds it.

        At once, if it is there; else waits for a thread, and then for at most the time limit.

        Raises:
            InvalidGrammarError: it is wrong, or has something that is not supported.
            GrammarTimeoutError: it takes too long.
            PromptError: compiling failed by a fault of the server.
            UnsupportedFieldError: the engine has no grammars.
        """
        check_grammar(grammar)
        if self._compiler is None:
            raise UnsupportedFieldError("answers within a grammar are not supported by this server", param="grammar")
        found = self._compiler.find(grammar)
        if found is not None:
            return found
        work = _Compile(self._compiler, grammar, self._call_soon)
        self._threads.run_soon(work.run)
        try:
            await work.begun.wait()
            with anyio.move_on_after(self._timeout_s):
                await work.done.wait()
        finally:
            work.is_wanted = False
        if work.error is not None:
            raise work.error
        if work.compiled is None:
            raise GrammarTimeoutError(
                f"the grammar took longer to compile than the {self._timeout_s:g} s that it may; make it simpler",
                param="grammar",
            )
        return work.compiled

    def close(self) -> None:
        """Let the threads end; waits for nothing."""
        self._threads.close()
