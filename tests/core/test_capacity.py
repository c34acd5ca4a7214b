"""What fits: the one formula, against counting block by block."""

from __future__ import annotations

import pytest

from aserve.core.capacity import Capacity


def make(num_blocks: int, block_size: int = 4, **changes: object) -> Capacity:
    sizes = {"max_num_seqs": 1, "max_batch_tokens": 8, "max_model_len": 500} | changes
    return Capacity(num_blocks=num_blocks, block_size=block_size, **sizes)


def test_one_group_holds_as_many_tokens_as_it_has_places() -> None:
    assert make(10).max_length == 40
    assert make(10).num_blocks_for(40) == 10
    assert make(10).num_blocks_for(41) == 11
    assert make(10, max_model_len=39).max_length == 39
    assert make(10).max_new_tokens(40) == 0
    assert make(10).table_width == 10


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("windows", [(1,), (2,), (7,), (None, 5), (None, 1, 16, 17)])
def test_what_a_sequence_may_hold_is_what_single_steps_hold_at_most(
    block_size: int, windows: tuple[int | None, ...]
) -> None:
    capacity = make(10_000, block_size, windows=windows)
    most = 0
    for position in range(150):  # the row of one token at this position, with all before it computed
        touched = 0
        for window in windows:
            first = 0 if window is None else max(0, position - window + 1)
            touched += position // block_size - first // block_size + 1
            assert capacity.first_block(window, position) == first // block_size
        most = max(most, touched)
        assert capacity.num_blocks_for(position + 1) >= most
    assert capacity.num_blocks_for(150) == most


@pytest.mark.parametrize("windows", [(None,), (None, 5), (None, 9, 9), (6,), (2, 30)])
@pytest.mark.parametrize("num_blocks", [6, 7, 8, 13, 30])
def test_the_longest_sequence_fits_and_one_token_more_does_not(
    num_blocks: int, windows: tuple[int | None, ...]
) -> None:
    if num_blocks < make(1000, windows=windows).num_blocks_for(1):
        return
    capacity = make(num_blocks, windows=windows)
    assert capacity.num_blocks_for(capacity.max_length) <= num_blocks
    if capacity.max_length < capacity.max_model_len:
        assert capacity.num_blocks_for(capacity.max_length + 1) > num_blocks


def test_windows_alone_are_no_limit() -> None:
    assert make(3, windows=(6,)).max_length == 500
    assert make(2, windows=(6,)).max_length == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"num_blocks": 2, "windows": (None, 4, 4)}, "num_blocks must be at least 3, one per KV group"),
        ({"windows": ()}, "one positive number or None per KV group"),
        ({"windows": (0,)}, "one positive number or None per KV group"),
        ({"num_host_blocks": -1}, "num_host_blocks must be at least 0"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**({"num_blocks": 10} | changes))
