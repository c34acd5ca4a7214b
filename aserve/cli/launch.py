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


def engine_opener() -> Callable[[EngineConfig], AbstractAsyncContextManager[Engine]]:
    """``open_engine`` with this machine's cache folder."""
    from aserve.assembly import open_engine

    return partial(open_engine, cache_dir=env.cache_folder(), offline=env.offline())


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
