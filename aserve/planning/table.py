"""The table that the start of a server and ``aserve plan`` print: where the memory goes, and what requests fit.

At most 80 columns. Called with what was sized; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from aserve.core.capacity import Capacity
from aserve.core.memory import MemoryUse
from aserve.planning.sizes import show_size

_NAME = 48


def memory_table(memory: MemoryUse, capacity: Capacity) -> str:
    """Return the lines."""
    where = memory.device if memory.on_gpu else "the host"
    lines = [_row(f"memory of {where}", memory.total, memory.total)]
    lines += [_row(f"  {name}", size, memory.total) for name, size in memory_rows(memory)]
    if memory.host_kv and memory.on_gpu:
        lines.append(_row("host memory for KV that left the cache", memory.host_kv, 0))
    return "\n".join([*lines, *_requests(memory, capacity)])


def memory_rows(memory: MemoryUse) -> Iterator[tuple[str, int]]:
    """Name and bytes of everything on the device; together they are its whole memory."""
    yield "weights", memory.weights
    yield "activations and sampling of the largest step", memory.activations
    if memory.on_gpu:
        yield "CUDA graphs", memory.graphs
    yield "KV cache", memory.kv_cache
    if memory.host_kv and not memory.on_gpu:
        yield "KV that left the cache", memory.host_kv
    yield "other processes" + (", driver and kernels" if memory.on_gpu else ""), memory.others
    yield "left free", memory.unused


def full_length_requests(capacity: Capacity) -> int:
    """How many requests of the longest length run in parallel."""
    return min(capacity.num_blocks // capacity.num_blocks_for(capacity.max_length), capacity.max_num_seqs)


def memory_line(memory: MemoryUse, capacity: Capacity) -> str:
    """The same in one line, for logs."""
    rows = ", ".join(f"{name} {show_size(size)}" for name, size in memory_rows(memory))
    return (
        f"memory of {show_size(memory.total)}: {rows}; {capacity.num_kv_tokens} KV tokens, longest request "
        f"{capacity.max_length} tokens, {full_length_requests(capacity)} of that length in parallel"
    )


def _requests(memory: MemoryUse, capacity: Capacity) -> Iterator[str]:
    token_bytes = memory.kv_cache // (capacity.num_blocks * capacity.block_size)  # in the layers of one group
    yield (
        f"KV cache: {capacity.num_kv_tokens:,} tokens in {capacity.num_blocks:,} blocks of {capacity.block_size}, "
        f"{capacity.num_groups * token_bytes:,} bytes a token"
    )
    if capacity.num_groups > 1 or capacity.windows != (None,):
        yield f"KV groups: {_windows(capacity.windows)}"
        yield "  (tokens behind a window make room for others)"
    limit = "context" if capacity.max_length == capacity.max_model_len else "KV cache"
    yield f"longest request: {capacity.max_length:,} tokens, prompt and answer together (the {limit})"
    num_requests = full_length_requests(capacity)
    full = " (--max-num-seqs)" if num_requests == capacity.max_num_seqs else ""
    yield f"requests of that length in parallel: {num_requests:,}{full}"


def _windows(windows: tuple[int | None, ...]) -> str:
    counts = {window: windows.count(window) for window in windows}
    names = {window: "the whole context" if window is None else f"a window of {window:,}" for window in counts}
    return ", ".join(f"{count} with {names[window]}" for window, count in counts.items())


def _row(name: str, size: int, total: int) -> str:
    share = f"{100 * size / total:6.1f} %" if total else ""
    return f"{name:{_NAME}.{_NAME}}{show_size(size):>12} {share}".rstrip()
