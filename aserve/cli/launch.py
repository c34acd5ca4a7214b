"""How the commands open an engine: the environment's cache folder and offline switch, a progress bar while loading."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from aserve.cli import env

if TYPE_CHECKING:
    from aserve.core.config import EngineConfig
    from aserve.engine.engine import Engine


def engine_opener(*, show_progress: bool = False) -> Callable[[EngineConfig], AbstractAsyncContextManager[Engine]]:
    """``open_engine`` with this machine's cache folder, and a bar on stderr while weights are read if asked for."""
    from aserve.assembly import open_engine

    progress = _loading_bar() if show_progress else None
    return partial(open_engine, cache_dir=env.cache_folder(), offline=env.offline(), progress=progress)


def _loading_bar() -> Callable[[int, int], None]:
    """As ``progress_bar``, for a caller that does not know when it ends: it goes away when all bytes are there."""
    from tqdm import tqdm

    bar = tqdm(desc="loading", unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show


@contextmanager
def progress_bar(label: str) -> Generator[Callable[[int, int], None]]:
    """A byte counter on stderr, as a function of (bytes done, bytes in all); silent unless stderr is a terminal."""
    from tqdm import tqdm

    with tqdm(desc=label, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def line_counter() -> Generator[Callable[[], None]]:
    """A counter of finished lines on stderr, as a function called once per line; silent unless it is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=" lines", disable=None) as bar:

        def count() -> None:
            bar.update()

        yield count
