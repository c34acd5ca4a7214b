"""Sampling in Triton; the contract is ``kernel_set.Sample``. One program per row, no sort, no synchronisation.

The filters and the draw are questions about prefixes of the most-likely-first order. A prefix ends at a cut: the
smallest logit in it, and how many of the logits equal to that one, by id. A cut is found by bisection over the bits of
float32; each step is one pass over the row (which stays in the L2 cache) that counts the logits above the middle and
adds up their weights. Sums always run in the same order, so a row's result has no part of its batch.
"""

# Triton functions have no types that Python tools know: their parameters are pointers, scalars and constants.
# ruff: noqa: ANN001, ANN202, PLR0917
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.sizes import next_power_of_2

_MAX_TILE = 8192


@triton.jit
def _keys(x):
    """Map float32 to integers in the same order, int64; both zeros to one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _weight_of(key, largest, temperature):
    """Return the weight exp((logit - largest) / temperature) of the logit with this key."""
    bits = key.to(tl.int32)
    x = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return tl.exp((x - largest) / temperature)


@triton.jit
def _above(row_ptr, vocab_size, key, largest, temperature, min_weight, TILE: tl.constexpr):
    """Return number and summed weight of the logits with a greater key and a weight of at least ``min_weight``."""
    numbers = tl.zeros([TILE], tl.int32)
    weights = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        weight = tl.exp((x - largest) / temperature)
        chosen = (ids < vocab_size) & (_keys(x) > key) & (weight >= min_weight)
        numbers += chosen.to(tl.int32)
        weights += tl.where(chosen, weight, 0.0)
    return tl.sum(numbers, axis=0), tl.sum(weights, axis=0)


@triton.jit
def _find_cut(
    row_ptr, vocab_size, low, high, max_number, max_mass, largest, temperature, min_weight, TILE: tl.constexpr
):
    """Return the least key in (low, high] above which are at most ``max_number`` logits of mass ``max_mass`` at most.

    That is a key which occurs, unless it is low + 1.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        number, mass = _above(row_ptr, vocab_size, middle, largest, temperature, min_weight, TILE)
        fits = (number <= max_number) & (mass <= max_mass)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    return high


@triton.jit
def _nth_equal(row_ptr, vocab_size, key, rank, TILE: tl.constexpr):
    """Return the id of the logit that is number ``rank`` of those with this key, or the last of them."""
    token = key.to(tl.int32) * 0 - 1
    seen = token + 1
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        equal = ((ids < vocab_size) & (_keys(x) == key)).to(tl.int32)
        ranks = seen + tl.cumsum(equal, axis=0) - 1
        token = tl.maximum(token, tl.max(tl.where((equal == 1) & (ranks <= rank), ids, -1), axis=0))
        seen += tl.sum(equal, axis=0)
    return tl.maximum(token, 0)


@triton.jit
def _draw_filtered(row_ptr, vocab_size, largest, temperature, top_k, top_p, min_p, uniform, TILE: tl.constexpr):
    """Return the token of a row with a filter, drawn in order of falling probability."""
    bottom = _keys(largest) * 0 - 0x80000000  # below every key
    top = _keys(largest)
    number, mass = _above(row_ptr, vocab_size, bottom, largest, temperature, 0.0, TILE)
    cut = bottom + 1
    equals = vocab_size  # how many with the key of the cut are kept
    limited = (top_k > 0) & (top_k < vocab_size)
    if limited:
        cut = _find_cut(row_ptr, vocab_size, bottom, top, top_k - 1, float("inf"), largest, temperature, 0.0, TILE)
        number, mass = _above(row_ptr, vocab_size, cut, largest, temperature, 0.0, TILE)
        equals = top_k - number
        mass += equals * _weight_of(cut, largest, temperature)
    if top_p < 1:
        # The prefix before the last kept logit falls short of the target: at most the float below it.
        target = top_p * mass
        short = target * (1 - 2.0**-23)
        cut_p = _find_cut(row_ptr, vocab_size, cut - 1, top, vocab_size, short, largest, temperature, 0.0, TILE)
        number, mass = _above(row_ptr, vocab_size, cut_p, largest, temperature, 0.0, TILE)
        missing = tl.ceil((target - mass) / _weight_of(cut_p, largest, temperature))
        equals_p = tl.maximum(missing, 1.0).to(tl.int32)
        equals = tl.where(cut_p > cut, equals_p, tl.minimum(equals_p, equals))
        cut = cut_p

    # Now min_p, then the draw among what is left.
    number, mass = _above(row_ptr, vocab_size, cut, largest, temperature, min_p, TILE)
    weight = _weight_of(cut, largest, temperature)
    if (limited | (top_p < 1)) & (weight >= min_p):
        mass += equals * weight
    target = tl.minimum(uniform * mass, mass * (1 - 2.0**-23))
    drawn = _find_cut(row_ptr, vocab_size, cut - 1, top, vocab_size, target, largest, temperature, min_p, TILE)
    number, mass = _above(row_ptr, vocab_size, drawn, largest, temperature, min_p, TILE)
    rank = ((target - mass) / _weight_of(drawn, largest, temperature)).to(tl.int32)
    rank = tl.where(drawn == cut, tl.minimum(rank, equals - 1), rank)
    return _nth_equal(row_ptr, vocab_size, drawn, rank, TILE)


@triton.jit
def _draw_by_id(row_ptr, vocab_size, largest, temperature, uniform, TILE: tl.constexpr):
    """Return the token of a row without filters, drawn in order of ids."""
    mass = largest * 0.0
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        mass += tl.sum(tl.exp((x - largest) / temperature), axis=0)
    # Strictly below the mass, which the same sums in the same order reach again: some tile holds the target.
    target = tl.minimum(uniform * mass, mass * (1 - 2.0**-23))
    before = largest * 0.0
    token = tl.program_id(0) * 0
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = tl.exp((x - largest) / temperature)
        after = before + tl.sum(weights, axis=0)
        if (before <= target) & (target < after):
            beyond = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0)
            place = tl.min(tl.where(beyond, ids, vocab_size), axis=0)
            # The scan may round below the sum: then it is the last with a weight.
            last = tl.max(tl.where(weights > 0, ids, 0), axis=0)
            token = tl.minimum(place, last)
        before = after
    return token


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    uniforms_ptr,
    tokens_ptr,
    logits_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_ks_ptr + row)
    top_p = tl.load(top_ps_ptr + row)
    min_p = tl.load(min_ps_ptr + row)
    uniform = tl.load(uniforms_ptr + row)

    highest = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        highest = tl.maximum(highest, tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")))
    largest = tl.max(highest, axis=0)

    if temperature == 0.0:
        token = _nth_equal(row_ptr, vocab_size, _keys(largest), 0, TILE)
    elif ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0):
        token = _draw_filtered(row_ptr, vocab_size, largest, temperature, top_k, top_p, min_p, uniform, TILE)
    else:
        token = _draw_by_id(row_ptr, vocab_size, largest, temperature, uniform, TILE)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)  # whatever a row of NaN led to
    tl.store(tokens_ptr + row, token.to(tl.int64))


def sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, uniforms: Tensor
) -> Tensor:
    """Return one token id per row."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _sample_kernel[(num_rows,)](
        logits,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        uniforms,
        tokens,
        logits.stride(0),
        vocab_size,
        TILE=min(_MAX_TILE, next_power_of_2(vocab_size)),
        num_warps=16,
    )
    return tokens
