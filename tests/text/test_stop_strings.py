"""Stop strings: the same result however the text is cut, and no more held back than needed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aserve.text.stop_strings import StopMatcher


def whole_text(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, bool]:
    """The definition: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


def feed(pieces: list[str], stop: tuple[str, ...], include: bool) -> tuple[str, bool]:
    matcher = StopMatcher(stop, include)
    shown = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown += text
        if matched:
            return shown, True
    return shown + matcher.finish(), False


LETTERS = st.text("aab", max_size=4)


@given(
    st.lists(LETTERS, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple),
    st.booleans(),
)
@example(["x", "a", "b", "c"], ("abc", "b"), False)
@example(["x", "a", "b", "c"], ("bc", "ab"), False)
@example(["aaab"], ("aab",), True)
def test_equals_the_whole_text_computation(pieces: list[str], stop: tuple[str, ...], include: bool) -> None:
    assert feed(pieces, stop, include) == whole_text("".join(pieces), stop, include)


@given(
    st.lists(LETTERS, max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
)
def test_holds_back_only_what_may_become_a_match(pieces: list[str], stop: tuple[str, ...]) -> None:
    matcher = StopMatcher(stop)
    whole = shown = ""
    for piece in pieces:
        whole += piece
        text, matched = matcher.push(piece)
        shown += text
        if matched:
            return
        held = whole[len(shown) :]
        assert whole == shown + held
        assert held == "" or any(s.startswith(held) for s in stop)


@pytest.mark.parametrize(("stop", "text"), [(("b",), "xa"), (("abc", "b"), "xa"), (("bc", "ab"), "x"), ((), "xabcy")])
def test_the_match_that_ends_first_wins(stop: tuple[str, ...], text: str) -> None:
    assert feed(list("xabcy"), stop, include=False)[0] == text


def test_text_is_cut_after_the_match_if_included() -> None:
    assert feed(["one", " two", " three"], (" tw",), include=True) == ("one tw", True)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(("b",))
    assert matcher.push("abc") == ("a", True)
    assert matcher.push("def") == ("", True)
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(("a", ""))


def test_long_self_similar_patterns_cost_linear_time() -> None:
    size = 20_000
    matcher = StopMatcher(("a" * size + "b", "a" * size + "c"))
    assert matcher.push("a" * 2 * size) == ("a" * size, False)
    assert matcher.push("b") == ("", True)
