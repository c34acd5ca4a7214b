"""The smallest change of one flag that makes a KV cache fit, or long enough: found by trying, never by a rule of thumb.

Every family of changes lists the values of one flag from the nearest to the farthest, and the first that reaches the
goal is looked for by bisection; what is returned has passed ``count_blocks``. Called when a size has been refused, and
for the warning about a cache that is shorter than the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from aserve.core.capacity import Capacity
from aserve.core.config import parse_bytes
from aserve.core.errors import ConfigError
from aserve.core.memory import MemoryUse
from aserve.planning.kv_size import (
    DEFAULT_GPU_FRACTION,
    Sizing,
    TooLittleMemoryError,
    count_blocks,
    with_cache,
)
from aserve.planning.limits import Limits
from aserve.planning.sizes import flag_size

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_HIGHEST_PERCENT = 97
"""Of a GPU; more would leave nothing for what the allocator cannot use."""
MOST_DRIVER_BYTES = _GIB
"""What may count as others even on a GPU that nobody else uses; ``aserve plan`` reckons with what it usually is."""
_LARGEST_GPU = 2**40
_SHORTEST_CONTEXT = 64
"""Nobody is advised to allow less."""

Goal = Callable[[Sizing], bool]


class Change(NamedTuple):
    """One flag with its value, as typed on a command line, and what would be sized with it."""

    flag: str
    sizing: Sizing


class _Family(NamedTuple):
    """The values of one flag by growing change, and how to make one of them a ``Change``."""

    values: Sequence[int]
    make: Callable[[int], Change]


def sized_capacity(sizing: Sizing) -> Capacity:
    """Return what fits.

    Raises TooLittleMemoryError, whose message has the numbers and ends with the smallest change that works.
    """
    try:
        num_blocks = count_blocks(sizing)
    except TooLittleMemoryError as error:
        raise TooLittleMemoryError(f"{error.message}; {_advice(sizing)}") from None
    return sizing.capacity(num_blocks)


def limit_warning(sizing: Sizing, capacity: Capacity) -> str | None:
    """What to tell who gets a cache that does not hold one request of the whole context; None when it does."""
    wanted, got = capacity.max_model_len, capacity.max_length
    if got >= wanted:
        return None
    change = smallest_change(sizing, _holds_the_context, shorter=False)
    remedy = f"set {change.flag} for {wanted}, or " if change else "no single flag makes room for all of it; "
    return (
        f"the KV cache holds {capacity.num_kv_tokens} tokens, so a request is limited to {got} tokens, prompt and "
        f"answer together, of a context of {wanted}; {remedy}set --max-model-len {got} to make this limit your own"
    )


def smallest_change(sizing: Sizing, goal: Goal, *, shorter: bool = True) -> Change | None:
    """Return the change of the first flag that reaches the goal; None when no single flag does.

    With ``shorter``, allowing shorter requests only is a change, too.
    """
    for family in (*_families(sizing), *([_shorter(sizing)] if shorter else [])):
        change = _first(family, goal)
        if change is not None:
            return change
    half = sizing.in_half
    return Change("--dtype bfloat16", half) if half is not None and goal(half) else None


def fits(sizing: Sizing) -> bool:
    """Whether there is a KV cache with these settings."""
    try:
        count_blocks(sizing)
    except ConfigError:
        return False
    return True


def smallest_gpu(sizing: Sizing) -> int | None:
    """Bytes of the smallest GPU, in whole GiB, on which the settings work as they are; None when none is so large."""

    def make(total: int) -> Change:
        return Change(str(total), _with_memory(sizing, total=total))

    found = _first(_Family(range(_GIB, _LARGEST_GPU + 1, _GIB), make), fits)
    return None if found is None else int(found.flag)


def _advice(sizing: Sizing) -> str:
    change = smallest_change(sizing, fits)
    if change is not None:
        return f"set {change.flag}"
    memory = sizing.memory_of(sizing.limits)
    if not memory.on_gpu:
        return "no single flag changes that: free memory, or use a smaller model"
    if memory.others > MOST_DRIVER_BYTES and fits(_with_memory(sizing, others=MOST_DRIVER_BYTES)):
        return "no single flag changes that: free what other programs hold"
    least = smallest_gpu(sizing)
    size = "" if least is None else f" (these settings take one of {least // _GIB} GiB)"
    return f"no single flag changes that: use a smaller or a quantized model, or a larger GPU{size}"


def _holds_the_context(sizing: Sizing) -> bool:
    try:
        num_blocks = count_blocks(sizing)
    except ConfigError:
        return False
    return sizing.blocks_for(sizing.limits.max_model_len) <= num_blocks


def _first(family: _Family, goal: Goal) -> Change | None:
    """The nearest change that reaches the goal, if all beyond it do, too; in any case one that does, or None."""
    low, high = -1, len(family.values) - 1  # low: not reached; high: reached
    if high < 0 or not goal(family.make(family.values[high]).sizing):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if goal(family.make(family.values[middle]).sizing):
            high = middle
        else:
            low = middle
    return family.make(family.values[high])


def _families(sizing: Sizing) -> Iterator[_Family]:
    cache, limits = sizing.cache, sizing.limits
    memory = sizing.memory_of(limits)
    if cache.kv_cache_memory is not None:
        yield from _by_memory(sizing, memory)
    elif cache.kv_cache_tokens is not None:
        yield from _by_tokens(sizing, memory, cache.kv_cache_tokens)
    elif memory.on_gpu:
        percent = (cache.gpu_memory_fraction or DEFAULT_GPU_FRACTION) * 100
        yield _Family(range(int(percent + 1e-9) + 1, _HIGHEST_PERCENT + 1), partial(_percent, sizing))
    else:
        yield from _by_tokens(sizing, memory, 0)
    tokens = limits.max_batch_tokens
    fewer = (*range((tokens - 1) // 128 * 128, 0, -128), *(n for n in (64, 32, 16) if n < tokens))
    yield _Family(fewer, partial(_limit, sizing, "max_batch_tokens"))
    yield _Family(range(limits.max_num_seqs - 1, 0, -1), partial(_limit, sizing, "max_num_seqs"))


def _shorter(sizing: Sizing) -> _Family:
    lengths = range(sizing.limits.max_model_len - 1, _SHORTEST_CONTEXT - 1, -1)
    return _Family(lengths, partial(_limit, sizing, "max_model_len"))


def _by_memory(sizing: Sizing, memory: MemoryUse) -> Iterator[_Family]:
    now = parse_bytes(sizing.cache.kv_cache_memory or "")

    def make(size: int) -> Change:
        text = flag_size(size)
        return Change(f"--kv-cache-memory {text}", with_cache(sizing, kv_cache_memory=text))

    if now < memory.available:
        start, unit = _grid(now)
        yield _Family(range(start + unit, memory.available + 1, unit), make)
    least = sizing.blocks_for(1) * sizing.block_bytes
    start, unit = _grid(min(now, memory.available))
    yield _Family(range(start, least - 1, -unit), make)


def _by_tokens(sizing: Sizing, memory: MemoryUse, now: int) -> Iterator[_Family]:
    most = memory.available // sizing.block_bytes // sizing.blocks_of_tokens(1) * sizing.cache.block_size

    def make(tokens: int) -> Change:
        return Change(f"--kv-cache-tokens {tokens}", with_cache(sizing, kv_cache_tokens=tokens))

    size = sizing.cache.block_size
    yield _Family(range(now // size * size + size, most + 1, size), make)
    if now:
        yield _Family(range(min(now, most), 0, -size), make)


def _grid(size: int) -> tuple[int, int]:
    """The size on the grid on which flags have it, and the grid's width."""
    unit = _MIB if size >= 64 * _MIB else _KIB
    return size // unit * unit, unit


def _percent(sizing: Sizing, percent: int) -> Change:
    fraction = percent / 100
    return Change(f"--gpu-memory-fraction {fraction:g}", with_cache(sizing, gpu_memory_fraction=fraction))


def _limit(sizing: Sizing, name: str, value: int) -> Change:
    limits = replace(sizing.limits, **{name: value})
    return Change(f"--{name.replace('_', '-')} {value}", replace(sizing, limits=limits))


def _with_memory(sizing: Sizing, **changes: int) -> Sizing:
    def memory_of(limits: Limits) -> MemoryUse:
        return replace(sizing.memory_of(limits), **changes)

    return replace(sizing, memory_of=memory_of)
