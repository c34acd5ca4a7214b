"""``aserve plan``: what memory a model takes and what requests fit, without a GPU, torch or weights.

The command finds the config and prints; the numbers are ``aserve.planning``'s.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from aserve.cli import env
from aserve.cli.settings import ConfigFile, engine_config, with_settings
from aserve.cli.sources import Sources
from aserve.core.config import CacheConfig, ModelConfig, SchedulerConfig
from aserve.core.errors import ConfigError
from aserve.planning.advice import limit_warning
from aserve.planning.plan import (
    NOT_SERVED,
    Plan,
    capacity_of,
    describe,
    fitting_capacity,
    make_plan,
    read_device,
)
from aserve.planning.table import full_length_requests, memory_table

WITHOUT = (
    "served_model_name", "device", "kernels", "num_threads", "chat_template", "debug_load_delay_s", "prefix_cache",
    "host_cache_memory", "max_queue", "max_queue_tokens", "max_queue_wait_s", "policy", "aging_steps",
    "prefix_lookahead",
)  # fmt: skip
"""Settings that change no size."""


def command(sources: Sources) -> Callable[..., int]:
    """The command, with one flag per setting that changes a size."""

    @with_settings(ModelConfig, CacheConfig, SchedulerConfig, without=WITHOUT)
    def plan(
        *,
        gpu_memory: Annotated[str | None, Parameter(group="GPU")] = None,
        kv_dtype: Annotated[Literal["auto", "bf16", "fp8", "int8", "int4"], Parameter(group="GPU")] = "auto",
        tp: Annotated[int, Parameter(group="GPU")] = 1,
        config: ConfigFile = None,
        **values: Any,
    ) -> int:
        """Print how a model would fill a GPU, and how long and how many requests may be. Needs no GPU and no weights.

        Takes the flags of serve that change a size. The code is 2, and the last line says what to change, when the
        model does not fit.

        Parameters
        ----------
        model
            A built-in name, a folder, a config.json or .gguf file, or a hub id, whose config alone is downloaded.
        gpu_memory
            Memory of the GPU, for example 24GiB.
        kv_dtype
            Type of stored keys and values; auto takes the model's, as serve does.
        tp
            GPUs that share the model.
        """
        from aserve.hub import find_config

        settings, device = engine_config(values), read_device(gpu_memory, tp)
        found = find_config(settings.model.model, revision=settings.model.revision, offline=env.offline())
        planned = make_plan(settings, found, device, kv_dtype)
        print(f"{settings.model.model}")
        print("\n".join(describe(planned)), end="\n\n")
        _print_result(planned)
        return 0

    return plan


def _print_result(plan: Plan) -> None:
    """Raises ConfigError when the type of KV that was asked for does not fit; what does is printed all the same."""
    failure: ConfigError | None = None
    try:
        capacity = capacity_of(plan)
    except ConfigError as error:
        failure = error
    else:
        assert capacity.memory is not None
        print(memory_table(capacity.memory, capacity), end="\n\n")
        warning = limit_warning(plan.sizing, capacity)
        if warning is not None:
            print(textwrap.fill(warning, 80, break_on_hyphens=False), end="\n\n")
    print("\n".join(_by_type(plan)))
    if failure is not None:
        raise failure


def _by_type(plan: Plan) -> Iterator[str]:
    """One line for each type of keys and values: how long a request may be, and how many of those run in parallel."""
    yield f"{'KV type':12}{'bytes/token':>14}{'KV tokens':>14}{'longest request':>18}{'in parallel':>14}"
    marked = False
    for kv, sizing in plan.sizings.items():
        capacity = fitting_capacity(sizing)
        mark = "" if plan.is_served(kv) else " *"
        marked = marked or bool(mark)
        name = f"{kv.name + mark:12}"
        if capacity is None:
            yield f"{name}{'does not fit':>28}"
            continue
        token_bytes = sizing.token_bytes * capacity.num_groups
        yield (
            f"{name}{token_bytes:>14,}{capacity.num_kv_tokens:>14,}{capacity.max_length:>18,}"
            f"{full_length_requests(capacity):>14,}"
        )
    if marked:
        yield f"* {NOT_SERVED}"
