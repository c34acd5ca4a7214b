"""The composition root: a configuration becomes an engine. The only module that knows all layers.

``open_engine`` is what the server, the command line and embedding programs open; everything below gets its parts as
arguments. The half that needs torch is imported on the step thread, so that the event loop answers while it loads.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

from aserve.core.abilities import is_encoder, read_abilities
from aserve.core.config import EngineConfig
from aserve.core.model_spec import check_architecture
from aserve.core.step import StepExecutor
from aserve.engine.engine import Engine, run_engine
from aserve.grammar import GrammarCompiler, Vocabulary
from aserve.hub import builtin_architecture, resolve
from aserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_CACHE = Path("~/.cache/aserve")

Progress = Callable[[int, int], None]


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    *,
    cache_dir: Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    fetch_progress: Progress | None = None,
) -> AsyncGenerator[Engine]:
    """Find and load the model, and yield the engine that serves it; works under trio and under asyncio.

    Args:
        cache_dir: where converted and downloaded models are kept; default ``~/.cache/aserve``.
        offline: never ask a hub.
        progress: told of (bytes loaded, bytes in all) while weights are read, from the step thread.
        fetch_progress: told of (bytes done, bytes in all) while a model is fetched or converted, from a worker thread.

    Raises:
        ConfigError: settings contradict each other, the model or the machine.
        ModelLoadError: the model is missing, damaged or of an unknown kind.
    """
    model = config.model
    await anyio.sleep(model.debug_load_delay_s)
    cache = (cache_dir or DEFAULT_CACHE).expanduser()
    architecture = builtin_architecture(model.model)
    if architecture is not None:
        check_architecture(architecture)  # before hundreds of megabytes are fetched
    find = partial(
        resolve,
        model.model,
        revision=model.revision,
        cache_dir=cache,
        offline=offline,
        progress=_announced(model.model, fetch_progress),
    )
    folder = await run_sync(find, abandon_on_cancel=True)
    abilities, max_length = await run_sync(read_abilities, folder)
    if max_length is not None and model.max_model_len is None:
        config = replace(config, model=replace(model, max_model_len=max_length))
    load_tokenizer = partial(Tokenizer.load, folder, chat_template=model.chat_template)
    tokenizer = await run_sync(load_tokenizer)  # not abandoned: a second at most, and native code at exit would abort
    grammars = grammar_compiler(tokenizer, size=config.grammar.grammar_cache)
    async with run_engine(
        executor_factory=partial(_build_executor, config, folder, progress, cache, grammars),
        tokenizer=tokenizer,
        config=config,
        model_names=model.served_model_name or (_name_of(model.model),),
        abilities=abilities,
        grammars=grammars,
    ) as engine:
        yield engine


def _announced(model: str, progress: Progress | None) -> Progress:
    """A progress function that logs one line when a model has to be fetched or converted at all."""
    is_first = True

    def report(done: int, total: int) -> None:
        nonlocal is_first
        if is_first:
            logger.info("fetching %s (%.0f MiB, download and conversion together)", model, total / 2**20)
            is_first = False
        if progress is not None:
            progress(done, total)

    return report


def grammar_compiler(tokenizer: Tokenizer, *, size: int) -> GrammarCompiler:
    """The compiler of grammars for a tokenizer; it reads the vocabulary when it is first used."""
    vocabulary = Vocabulary(
        serialised=tokenizer.serialised if tokenizer.has_bytes else None,
        num_ids=tokenizer.num_ids,
        end_token_ids=tokenizer.stop_token_ids,
        stripped_ids=tokenizer.stripped_ids if tokenizer.strips else None,
    )
    return GrammarCompiler(vocabulary, size=size)


def _build_executor(
    config: EngineConfig, folder: Path, progress: Progress | None, cache: Path, grammars: GrammarCompiler
) -> StepExecutor:
    # these bring torch: 1.6 s on two cores
    if is_encoder(folder):
        from aserve.runtime.build_encoder import build_encoder

        return build_encoder(config, folder, progress=progress, cache_dir=cache)
    from aserve.runtime.executor import build_executor

    return build_executor(config, folder, progress=progress, cache_dir=cache, grammars=grammars)


def _name_of(model: str) -> str:
    """A folder or file is named by its last part, a file without its ending; anything else is its own name."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    return path.name if path.is_dir() else path.stem
