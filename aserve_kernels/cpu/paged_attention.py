"""Attention over the paged cache on the CPU; the contract is ``kernel_set.PagedAttention``.

Decode rows are grouped by similar length, their pages gathered (whole block rows, so that copies are contiguous) and
attended to together. Prefill chunks go one by one. Both end in torch's fused CPU attention, with query heads and KV
heads matched by shape: ``enable_gqa`` makes a decode step four times slower (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_GROUP_POSITIONS = 8192  # gathered at once, padding included: bounds the scratch memory
_PADDING_SLACK = 256  # positions that cost about as much as one more call
_QUERY_TILE = 256  # queries of a chunk that share one mask


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(capped scale * q k^T, causal and within the window) v."""
    cache = _Cache(k_cache, v_cache, block_tables)
    scores = _Scores(scale, softcap)
    bounds, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    reach = max_seq_len if window is None else window
    result = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    decodes: list[_Decode] = []
    for s, length in enumerate(lengths):
        row, end = bounds[s], bounds[s + 1]
        if length == 0:
            result[row:end] = 0
        elif end - row == 1:
            decodes.append(_Decode(s, row, max(0, length - reach), length))
        elif end > row:
            _attend_chunk(q[row:end], cache, s, length, scores, reach, out=result[row:end])
    for group in _groups(decodes) if len(decodes) > 1 else (decodes,):
        _attend_group(q, cache, group, scores, out=result)
    return result


class _Scores(NamedTuple):
    """How scores are made of q k^T."""

    scale: float
    softcap: float | None

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """Return attention of queries [..., L, D] to keys and values [..., K, D]; causal from position 0 if asked."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(q, keys, values, mask, is_causal=causal, scale=self.scale)
        assert not causal, "torch's attention caps nothing, and this form takes a mask"
        scores = (q @ keys.transpose(-1, -2)).float().mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            scores += mask
        return scores.softmax(dim=-1).to(q.dtype) @ values


class _Decode(NamedTuple):
    """One query token: query row ``row`` of sequence ``sequence`` sees positions [start, end)."""

    sequence: int
    row: int
    start: int
    end: int


class _Cache(NamedTuple):
    keys: Tensor  # [N, P, Hkv, D]
    values: Tensor
    block_tables: Tensor  # [S, B]

    def read(self, sequence: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [end - start, Hkv, D] of positions [start, end); views if the blocks are in a row."""
        block_size = self.keys.shape[1]
        first, offset = divmod(start, block_size)
        blocks = self.block_tables[sequence, first : -(-end // block_size)]
        ids = blocks.tolist()
        if ids == list(range(ids[0], ids[0] + len(ids))):
            keys, values = (x[ids[0] : ids[0] + len(ids)] for x in (self.keys, self.values))
        else:
            keys, values = self.gather(blocks)
        rows = slice(offset, offset + end - start)
        return keys.flatten(0, 1)[rows], values.flatten(0, 1)[rows]

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of ``blocks`` [n], each [n, P, Hkv, D]."""
        shape = (-1, *self.keys.shape[1:])
        keys, values = (x.flatten(1).index_select(0, blocks).view(shape) for x in (self.keys, self.values))
        return keys, values


def _attend_chunk(
    q: Tensor, cache: _Cache, sequence: int, length: int, scores: _Scores, reach: int, *, out: Tensor
) -> None:
    """Write the outputs of a prefill chunk, queries [L, Hq, D] that see ``reach`` positions up to their own."""
    start = length - len(q)
    if start == 0 and reach >= length and scores.softcap is None:
        out.copy_(_attention(q, *cache.read(sequence, 0, length), scores, mask=None))
        return
    first_key = max(0, start - reach + 1)
    keys, values = cache.read(sequence, first_key, length)
    for tile in range(start, length, _QUERY_TILE):
        tile_end = min(tile + _QUERY_TILE, length)
        low = max(0, tile - reach + 1)
        span = slice(low - first_key, tile_end - first_key)
        # Mask entry (i, j) is query tile + i and key low + j.
        mask = torch.full((tile_end - tile, tile_end - low), -math.inf, dtype=q.dtype, device=q.device)
        hidden = mask.triu(tile - low + 1)
        if reach < length:
            hidden += mask.tril_(tile - low - reach)
        rows = slice(tile - start, tile_end - start)
        out[rows] = _attention(q[rows], keys[span], values[span], scores, hidden)


def _attention(q: Tensor, keys: Tensor, values: Tensor, scores: _Scores, mask: Tensor | None) -> Tensor:
    """Return [L, Hq, D] for queries [L, Hq, D] of one sequence; causal from position 0 without a mask."""
    num_kv_heads = keys.shape[1]
    grouped = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, group, L, D]
    # The KV heads are the batch, and shared within it by a stride of 0.
    keys, values = (x.transpose(0, 1).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (keys, values))
    attended = scores.attend(grouped, keys, values, mask, causal=mask is None)
    return attended.permute(2, 0, 1, 3).flatten(1, 2)


def _groups(decodes: list[_Decode]) -> Iterator[list[_Decode]]:
    """Split decodes, by rising length, wherever padding or memory would grow too large."""
    group: list[_Decode] = []
    total = 0
    for decode in sorted(decodes, key=lambda d: d.end - d.start):
        visible = decode.end - decode.start
        padded = (len(group) + 1) * visible
        padding = padded - total - visible
        if group and (padded > _MAX_GROUP_POSITIONS or padding > _PADDING_SLACK + total // 4):
            yield group
            group, total = [], 0
        group.append(decode)
        total += visible
    if group:
        yield group


def _attend_group(q: Tensor, cache: _Cache, group: list[_Decode], scores: _Scores, *, out: Tensor) -> None:
    """Write the outputs of decode rows."""
    if not group:
        return
    if len(group) == 1:
        [decode] = group
        keys, values = (x.unsqueeze(0) for x in cache.read(decode.sequence, decode.start, decode.end))
        rows = slice(decode.row, decode.row + 1)
        _attend_rows(q[rows], keys, values, scores, None, out=out[rows])
        return
    keys, values, mask = _gather_group(cache, group, q.dtype)
    rows = [decode.row for decode in group]
    if rows == list(range(len(q))):
        _attend_rows(q, keys, values, scores, mask, out=out)
    else:
        index = torch.tensor(rows, device=q.device)
        selected = q.index_select(0, index)
        _attend_rows(selected, keys, values, scores, mask, out=selected)
        out.index_copy_(0, index, selected)


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, scores: _Scores, mask: Tensor | None, *, out: Tensor) -> None:
    """Write [n, Hq, D] for one query [Hq, D] and keys [L, Hkv, D] of each of n sequences; ``out`` may be ``q``."""
    # The query heads of a KV head take the place of the query tokens in torch's attention.
    shape = (len(q), keys.shape[2], -1, q.shape[2])  # [n, Hkv, group, D]
    attended = scores.attend(q.view(shape), keys.transpose(1, 2), values.transpose(1, 2), mask)
    out.view(shape).copy_(attended)


def _gather_group(cache: _Cache, group: list[_Decode], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys and values [n, L, Hkv, D] from each row's first visible block on, and what to add to scores."""
    block_size = cache.keys.shape[1]
    first_blocks = [decode.start // block_size for decode in group]
    starts = [decode.start % block_size for decode in group]
    ends = [decode.end - block * block_size for decode, block in zip(group, first_blocks, strict=True)]
    longest = max(ends)
    device = cache.keys.device  # named, since a program may have set another default
    num_blocks = -(-longest // block_size)

    tables = cache.block_tables
    sequences = [decode.sequence for decode in group]
    if sequences != list(range(len(tables))):
        tables = tables[sequences]
    if any(first_blocks):
        columns = torch.tensor(first_blocks, device=device).unsqueeze(1) + torch.arange(num_blocks, device=device)
        tables = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
    keys, values = cache.gather(tables[:, :num_blocks].flatten())
    shape = (len(group), num_blocks * block_size, *keys.shape[2:])
    keys, values = keys.view(shape)[:, :longest], values.view(shape)[:, :longest]
    if not any(starts) and min(ends) == longest:
        return keys, values, None

    places = torch.arange(longest, device=device)
    hidden = places >= torch.tensor(ends, device=device).unsqueeze(1)
    if any(starts):
        hidden |= places < torch.tensor(starts, device=device).unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
    return keys, values, mask[:, None, None]
