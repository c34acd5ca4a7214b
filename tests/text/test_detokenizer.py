"""Detokenizing: all increments together are the text of all ids, whatever the tokenizer and however broken."""

from __future__ import annotations

import random
import re
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders
from tokenizers import Tokenizer as RawTokenizer

from aserve.text.detokenizer import ByteDetokenizer
from aserve.text.token_bytes import byte_scheme
from aserve.text.tokenizer import Tokenizer

KIND = st.sampled_from(["byte_level", "sentencepiece", "gemma", "metaspace", "word_piece"])
TEXT = "the théâtre costs 3 € 😀🙂 in the\n\nend"


def split(ids: list[int], cuts: random.Random) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for i in ids:
        if cuts.random() < 0.6:
            pieces.append([])
        pieces[-1].append(i)
    return pieces


def streamed(tokenizer: Tokenizer, pieces: list[list[int]], *, skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return "".join([detokenizer.push(p) for p in pieces]) + detokenizer.finish()


def byte_runs_are_sound(raw: RawTokenizer, ids: list[int], *, skip: bool) -> bool:
    """Whether each run of <0x..> tokens is UTF-8; for others the library drops the whole run."""
    special = {i for i, t in raw.get_added_tokens_decoder().items() if t.special} if skip else set()
    tokens = [raw.id_to_token(i) for i in ids if i not in special]
    for is_byte, run in groupby(tokens, lambda t: bool(re.fullmatch("<0x..>", t))):
        if is_byte:
            try:
                bytes(int(t[3:5], 16) for t in run).decode()
            except UnicodeDecodeError:
                return False
    return True


@given(kind=KIND, data=st.data(), cuts=st.randoms(use_true_random=False), skip=st.booleans())
def test_increments_join_to_the_text_of_all_ids(
    kinds: dict[str, RawTokenizer], loaded: dict[str, Tokenizer], kind: str, data: Any, cuts: random.Random, skip: bool
) -> None:
    raw, tokenizer = kinds[kind], loaded[kind]
    parts = st.one_of(
        st.integers(0, raw.get_vocab_size() - 1).map(lambda i: [i]),
        st.text(max_size=6).map(lambda t: raw.encode(t, add_special_tokens=False).ids),
    )
    ids = [i for part in data.draw(st.lists(parts, max_size=20)) for i in part]
    text = streamed(tokenizer, split(ids, cuts), skip=skip)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    if byte_runs_are_sound(raw, ids, skip=skip):
        assert text == raw.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
def test_text_is_out_as_soon_as_its_characters_are_complete(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(TEXT)
    detokenizer = tokenizer.detokenizer()
    shown, given_bytes = "", b""
    for i in ids:
        shown += detokenizer.push([i])
        given_bytes += tokenizer.token_bytes(i)
        assert shown.strip() == given_bytes.decode(errors="ignore").strip()
    assert shown + detokenizer.finish() == TEXT


@given(st.lists(st.binary(max_size=3), max_size=8))
def test_broken_bytes_are_replaced_as_python_does(pieces: list[bytes]) -> None:
    detokenizer = ByteDetokenizer(dict(enumerate(pieces)))
    text = "".join([detokenizer.push([n]) for n in range(len(pieces))]) + detokenizer.finish()
    assert text == b"".join(pieces).decode(errors="replace")


def test_a_lone_broken_byte_does_not_swallow_its_neighbours(loaded: dict[str, Tokenizer]) -> None:
    table = {0: b"\xf1", 1: b"A", 2: b"\x80", 3: b"B!"}
    detokenizer = ByteDetokenizer(table)
    assert [detokenizer.push([n]) for n in table] == ["", "\ufffdA", "\ufffd", "B!"]
    tokenizer = loaded["sentencepiece"]
    broken, letter = tokenizer.encode("\x80")[-1], tokenizer.encode("ta")[-1]
    assert tokenizer.decode([letter, broken, letter]) == "a\ufffda"


def test_complete_characters_survive_beside_a_broken_byte_token(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["gemma"]
    smile, broken = tokenizer.encode("x😀")[-4:], tokenizer.encode("x\xff")[-2]
    assert tokenizer.decode([*smile, broken, *smile]) == "😀\ufffd😀"


def test_a_character_cut_by_the_end_is_one_replacement(loaded: dict[str, Tokenizer]) -> None:
    detokenizer = loaded["gemma"].detokenizer()
    cut = loaded["gemma"].encode("x😀")[-4:-1]
    assert detokenizer.push(cut) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_ids_without_a_token_are_nothing(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    a = tokenizer.encode("a")[-1]
    assert tokenizer.decode([100_000, a, -2]) == tokenizer.decode([a])
    assert tokenizer.token_bytes(100_000) == tokenizer.token_bytes(-2) == b""


def test_token_bytes_are_exact(loaded: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "gemma"):
        tokenizer = loaded[kind]
        ids = tokenizer.encode("é😀 the", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).strip() == "é😀 the".encode()
        assert tokenizer.token_bytes(tokenizer.encode("<|im_end|>")[-1]) == b"<|im_end|>"
    assert loaded["metaspace"].token_bytes(loaded["metaspace"].encode("🙂")[-1]) == "🙂".encode()


def test_special_tokens_are_left_out_or_shown(loaded: dict[str, Tokenizer]) -> None:
    for tokenizer in loaded.values():
        ids = tokenizer.encode("the<|im_end|>")
        assert tokenizer.decode(ids).strip() == "the"
        assert tokenizer.decode(ids, skip_special_tokens=False).strip().replace(" ", "") == "the<|im_end|>"


def test_a_window_does_not_grow(loaded: dict[str, Tokenizer]) -> None:
    """Thousands of ids, hidden ones and replacement characters among them, at a cost that stays small."""
    tokenizer = loaded["word_piece"]
    a, hidden = tokenizer.encode("a")[-1], tokenizer.encode("<|im_end|>")[-1]
    detokenizer = tokenizer.detokenizer()
    sizes: list[int] = []
    for n in range(2000):
        detokenizer.push([a if n % 10 == 0 else hidden])
        sizes.append(len(detokenizer._ids))  # type: ignore[attr-defined]
    assert max(sizes) < 20


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
    ],
    ids=str,
)
def test_decoders_that_look_at_several_tokens_have_no_table(decoder: Any) -> None:
    assert byte_scheme(decoder) is None


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.ByteLevel(),
        decoders.Sequence([decoders.ByteLevel()]),
        decoders.Fuse(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ],
    ids=str,
)
def test_decoders_that_work_token_by_token_have_a_table(decoder: Any) -> None:
    assert byte_scheme(decoder) is not None
