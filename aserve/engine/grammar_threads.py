"""Threads that compile grammars: few, of their own, with deep stacks.

A compile that takes longer than it may cannot be stopped, so its thread stays taken until it ends, and the program may
end without it: that is what neither anyio's worker threads nor a pool of the standard library's do. Used by
``engine.grammars``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

STACK_BYTES = 64 * 2**20
"""Of address space, not of memory: the compiler recurses along references, at about 4 kB for each."""

Work = Callable[[], None]


class GrammarThreads:
    """Runs work in the order in which it is given; started when first needed."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run_soon(self, work: Work) -> None:
        """Have this called, which must not raise. From the event loop only."""
        self._queue.put(work)
        if len(self._threads) < self._num_threads:
            self._start_one()

    def close(self) -> None:
        """Let the threads end after what has been given to them; waits for nothing. Idempotent."""
        for _ in self._threads:
            self._queue.put(None)
        self._threads.clear()

    def _start_one(self) -> None:
        thread = threading.Thread(target=self._run, name=f"aserve-grammar-{len(self._threads)}", daemon=True)
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
        self._threads.append(thread)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
