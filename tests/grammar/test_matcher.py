"""Where a sequence may end, what is taken again after a preemption, and what a failing matcher does."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
from grammar_walk import PROMPT, first_row

from aserve.assembly import grammar_compiler
from aserve.core.grammar import Grammar, GrammarKind
from aserve.core.step import GRAMMAR_FAILED, INVALID_TOKEN, ScheduledSequence
from aserve.grammar import GrammarSlots, settle
from aserve.testing import EOS

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{1,4}")
AB = Grammar(GrammarKind.CHOICE, '["ab"]')
NEWLINES = Grammar(GrammarKind.REGEX, "a\n?b")


def test_an_end_comes_only_where_the_grammar_may_end(walk):
    state = walk(DIGITS)
    assert EOS not in state.allowed()
    state.take(ord("1"))
    assert EOS in state.allowed()
    assert set(state.allowed()) == {*b"0123456789", EOS}


def test_a_complete_grammar_says_so_with_its_last_token(walk):
    state = walk(AB)
    state.take(97)
    assert not state.completed
    state.take(98)
    assert state.completed


def test_min_tokens_hold_an_end_back_while_there_is_anything_else(walk):
    state = walk(DIGITS, min_tokens=3)
    for _ in range(3):
        assert EOS not in state.allowed()
        state.take(ord("7"))
    assert EOS in state.allowed()


def test_min_tokens_do_not_hold_back_the_only_way_on(compiler, walk):
    longer = walk(Grammar(GrammarKind.LARK, 'start: "a" | "a" <|im_start|>'), min_tokens=9, stop=(EOS, 258))
    longer.take(97)
    assert longer.allowed() == [EOS, 258], "a stop id is no content, and nothing else is left"


def test_stop_ids_of_the_request_end_it_and_are_no_content(walk):
    state = walk(NEWLINES, stop=(EOS, 10))
    state.take(97)
    assert state.allowed() == [98], "a line break would end an answer that is not complete"


def test_ignored_ends_stay_out(walk):
    state = walk(DIGITS, stop=())
    state.take(ord("1"))
    assert set(state.allowed()) == set(b"0123456789")


@pytest.mark.parametrize("num_cached", [0, 2, 3, 7])
def test_a_preempted_sequence_takes_its_tokens_again_in_pieces(compiler, walk, num_cached):
    before = walk(Grammar(GrammarKind.JSON_OBJECT))
    for token_id in b'{"a": [1, tr':
        before.take(token_id)
    slots = GrammarSlots(compiler)
    whole = (*PROMPT, *before.generated)
    row = first_row(Grammar(GrammarKind.JSON_OBJECT), prior=whole[:num_cached], token_ids=whole[num_cached:8])
    slots.observe(row)
    slots.observe(row._replace(start=8, token_ids=whole[8:9], new=None))
    slots.observe(row._replace(start=9, token_ids=whole[9:], new=None))
    again = slots.allowed(slots.matchers([0]), [len(whole)], 260)
    assert np.flatnonzero(np.unpackbits(again[0], bitorder="little")).tolist() == before.allowed() == [ord("u")]


def test_rows_are_masked_each_by_its_own_grammar(compiler):
    slots = GrammarSlots(compiler)
    held = [compiler.compile(grammar) for grammar in (DIGITS, AB)]
    for slot in range(8):
        slots.observe(first_row((DIGITS, AB)[slot % 2], slot=slot))
    masks = slots.allowed(slots.matchers(range(8)), [len(PROMPT)] * 8, 300)
    found = [set(np.flatnonzero(np.unpackbits(row, bitorder="little"))) for row in masks]
    assert found == [set(b"0123456789"), {97}] * 4
    assert masks.shape == (8, 38), "ids without a token are not allowed"
    assert held


def test_a_token_that_is_not_allowed_fails_its_own_row_only(compiler, caplog):
    slots = GrammarSlots(compiler)
    held = compiler.compile(AB)
    for slot in range(2):
        slots.observe(first_row(AB, slot=slot))
    matchers = slots.matchers([0, 1])
    settled = settle((5, 120, 97, INVALID_TOKEN), [1, 2], matchers)
    assert settled.token_ids == (5, GRAMMAR_FAILED, 97, INVALID_TOKEN)
    assert "a grammar failed" in caplog.text
    masks = slots.allowed(matchers, [4, 4], 260)
    assert not masks[0].any()
    assert masks[1].any()
    assert settle((98, 98), [0, 1], matchers) == ((GRAMMAR_FAILED, 98), {1})
    assert held


def test_a_grammar_that_is_not_there_fails_its_row(compiler):
    for slots in (GrammarSlots(None), GrammarSlots(compiler)):
        slots.observe(first_row(Grammar(GrammarKind.REGEX, "never compiled")))
        (matcher,) = slots.matchers([0])
        assert not slots.allowed([matcher], [3], 260).any()
        assert settle((97,), [0], [matcher]).token_ids == (GRAMMAR_FAILED,)


def test_compiled_grammars_stay_for_those_who_hold_them(byte_tokenizer):
    compiler = grammar_compiler(byte_tokenizer, size=2)
    grammars = [Grammar(GrammarKind.CHOICE, json.dumps([str(i)])) for i in range(5)]
    held = compiler.compile(grammars[0])
    for grammar in grammars[1:]:
        compiler.compile(grammar)
    gc.collect()
    assert compiler.find(grammars[0]) is held
    assert compiler.compile(grammars[0]) is held
    assert [compiler.find(grammar) is not None for grammar in grammars] == [True, False, False, False, True]
    assert compiler.find(grammars[4]) is not None
    del held
    compiler.compile(grammars[1])
    compiler.compile(grammars[2])
    gc.collect()
    assert compiler.find(grammars[0]) is None


def test_a_slot_is_reused(compiler):
    held = [compiler.compile(grammar) for grammar in (DIGITS, AB)]
    slots = GrammarSlots(compiler)
    slots.observe(first_row(DIGITS))
    slots.observe(first_row(AB))
    assert slots.matchers([0])[0].accept(97).value == "goes on"
    slots.close(0)
    with pytest.raises(KeyError):
        slots.observe(ScheduledSequence("r", 0, 3, (97,), (), True, None))
    assert held
