"""Which layers share a block table, for the models whose layers differ."""

from __future__ import annotations

import pytest

from aserve.core.kv_layout import KVGroup, KVLayout


def shape(windows: list[int | None]) -> tuple[int, list[int | None]]:
    layout = KVLayout.of(windows)
    return layout.layers_per_group, list(layout.windows)


GEMMA3 = [1024, 1024, 1024, 1024, 1024, None]


@pytest.mark.parametrize(
    ("windows", "size", "groups"),
    [
        ([None] * 32, 32, [None]),
        ([4096] * 32, 32, [4096]),
        ([4096, None] * 13, 13, [None, 4096]),
        ((GEMMA3 * 6)[:34], 5, [None] + [1024] * 6),
        ((GEMMA3 * 5)[:26], 4, [None] + [1024] * 6),
        (GEMMA3 * 8, 8, [None] + [1024] * 5),
        ([None] + [8] * 30, 5, [None] + [8] * 6),
        ([8, None, 16], 1, [None, 16, 8]),
    ],
)
def test_groups_of_equal_size_with_little_padding(
    windows: list[int | None], size: int, groups: list[int | None]
) -> None:
    assert shape(windows) == (size, groups)


@pytest.mark.parametrize("windows", [[None], [4, None, 4, 4, None, 4, 4], [3, 5, 7], [None] * 3 + [9] * 40])
def test_every_layer_has_a_place_of_its_own(windows: list[int | None]) -> None:
    layout = KVLayout.of(windows)
    places = [(layout.group_of(layer), layout.index_of(layer)) for layer in range(len(windows))]
    assert len(set(places)) == len(windows)
    for layer, (group, index) in enumerate(places):
        assert layout.groups[group].window == windows[layer]
        assert index < layout.layers_per_group


def test_more_kinds_of_windows_than_groups_usually_are() -> None:
    layout = KVLayout.of(list(range(1, 13)))
    assert layout.layers_per_group == 1
    assert len(layout.groups) == 12


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        KVLayout.of([])
    with pytest.raises(IndexError, match="no layer 3"):
        KVLayout((KVGroup(None, (0, 1, 2)),), 3).group_of(3)
