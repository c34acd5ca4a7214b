"""How the commands open an engine: the environment's cache folder and offline switch, progress bars on a terminal."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from aserve.cli import env

if TYPE_CHECKING:
    from aserve.core.config import EngineConfig
    from aserve.engine.engine import Engine


def engine_opener() -> Callable[[EngineConfig], AbstractAsyncContextManager[Engine]]:
    """``open_engine`` with this machine's cache folder, and bars while a model is fetched and its weights are read."""
    from aserve.assembly import open_engine

    @asynccontextmanager
    async def opened(config: EngineConfig) -> AsyncGenerator[Engine]:
        with ExitStack() as bars:
            fetching = bars.enter_context(progress_bar(f"fetching {config.model.model}"))
            loading = bars.enter_context(progress_bar("loading"))
            async with open_engine(
                config, cache_dir=env.cache_folder(), offline=env.offline(), fetch_progress=fetching, progress=loading
            ) as engine:
                bars.close()  # before the first answer is printed
                yield engine

    return opened


@contextmanager
def progress_bar(label: str) -> Generator[Callable[[int, int], None]]:
    """A byte counter on stderr, as a function of (bytes done, bytes in all); silent unless stderr is a terminal.

    It appears at the first call and goes away when all bytes are there, at the latest with the scope: whatever is
    printed before, after, or about a failure has its line to itself. Calls after that do nothing.
    """
    bar: Any = None
    is_over = False

    def show(done: int, total: int) -> None:
        nonlocal bar, is_over
        if is_over:
            return
        if bar is None:
            from tqdm import tqdm

            bar = tqdm(desc=label, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False)
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            end()

    def end() -> None:
        nonlocal is_over
        is_over = True
        if bar is not None:
            bar.close()

    try:
        yield show
    finally:
        end()


@contextmanager
def line_counter() -> Generator[Callable[[], None]]:
    """A counter of finished lines on stderr, as a function called once per line; silent unless it is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=" lines", disable=None) as bar:

        def count() -> None:
            bar.update()

        yield count
