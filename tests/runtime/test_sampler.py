"""Sampling against a float64 model of it, one sequence at a time, however the sequences are batched."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aserve.core.request import SamplingParams
from aserve.core.step import INVALID_TOKEN, PENDING, NewSequence, ScheduledSequence, StepPlan
from aserve.planning.activations import penalty_state_bytes
from aserve.runtime import penalties
from aserve.runtime.sampler import Sampled, Sampler
from aserve.runtime.uniforms import uniforms
from aserve_kernels import load

VOCAB = 60
STOP = (3, 4)


def make_sampler(max_num_seqs: int = 8, max_length: int = 64) -> Sampler:
    return Sampler(
        vocab_size=VOCAB,
        max_num_seqs=max_num_seqs,
        max_length=max_length,
        device=torch.device("cpu"),
        sample=load("reference").sample,
    )


class Story:
    """One sequence: its prompt, parameters, tokens so far, and a random model of its own."""

    def __init__(self, number: int, params: SamplingParams, prompt: Sequence[int] = (7, 8, 9)) -> None:
        self.number = number
        self.params = params
        self.prompt = list(prompt)
        self.tokens = list(prompt)

    def logits(self) -> NDArray[np.float32]:
        return np.random.default_rng([self.number, len(self.tokens)]).normal(0, 2, VOCAB).astype(np.float32)

    def row(self, slot: int, start: int, *, new: bool, samples: bool = True, pending: bool = False,
            end: int | None = None) -> ScheduledSequence:  # fmt: skip
        ids = tuple(self.tokens[start:end])
        if pending:
            ids = (*ids[:-1], PENDING)
        first = NewSequence(self.params, len(self.prompt), tuple(self.tokens[:start])) if new else None
        return ScheduledSequence(str(self.number), slot, start, ids, (), samples, first)

    def processed(self) -> NDArray[np.float64]:
        """The logits after penalties, bias and min_tokens, written from their definitions."""
        p = self.params
        x = self.logits().astype(np.float64)
        generated = self.tokens[len(self.prompt) :]
        for token in set(self.tokens):
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        for token in set(generated):
            x[token] -= p.presence_penalty + p.frequency_penalty * generated.count(token)
        for token, value in p.logit_bias:
            if token < VOCAB:
                x[token] += value
        if len(generated) < p.min_tokens:
            x[[i for i in p.stop_token_ids if i < VOCAB]] = -np.inf
        return x

    def logprobs(self) -> NDArray[np.float64]:
        x = self.processed()
        return x - x.max() - math.log(np.exp(x - x.max()).sum())

    def expected(self) -> int:
        p = self.params
        x = self.processed()
        if p.temperature <= 1e-5:
            return int(x.argmax())
        probs = np.exp((x - x.max()) / p.temperature)
        probs /= probs.sum()
        filtered = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
        order = np.argsort(-probs, kind="stable") if filtered else np.arange(VOCAB)
        if p.top_k > 0:
            order = order[: p.top_k]
        cumulative = probs[order].cumsum()
        if p.top_p < 1:
            order = order[: int((cumulative < p.top_p * cumulative[-1]).sum()) + 1]
        if p.min_p > 0:
            order = order[probs[order] >= p.min_p * probs.max()]
        cumulative = probs[order].cumsum()
        u = uniforms(np.array([p.seed], np.uint64), np.array([len(self.tokens)], np.int64))[0]
        return int(order[int((cumulative <= u * cumulative[-1]).sum())])


def observe(sampler: Sampler, rows: list[ScheduledSequence]) -> None:
    sampler.observe(StepPlan(0, tuple(rows)), np.array([row.slot for row in rows], np.int64))


def run_step(sampler: Sampler, rows: list[tuple[Story, ScheduledSequence]]) -> Sampled:
    """One step; the rows that sample get their stories' logits. The stories do not grow."""
    observe(sampler, [row for _, row in rows])
    sampling = [(story, row) for story, row in rows if row.samples]
    return sampler.sample(
        torch.from_numpy(np.stack([story.logits() for story, _ in sampling])),
        np.array([row.slot for _, row in sampling], np.int64),
        np.array([row.start + len(row.token_ids) for _, row in sampling], np.int64),
    )


ALL_KINDS = [
    SamplingParams(max_tokens=99, temperature=0),
    SamplingParams(max_tokens=99, temperature=1e-6),
    SamplingParams(max_tokens=99, temperature=1.3, seed=2**64 - 1),
    SamplingParams(max_tokens=99, temperature=0.8, top_k=5, top_p=0.9, seed=5),
    SamplingParams(max_tokens=99, temperature=2.0, min_p=0.1, seed=6),
    SamplingParams(max_tokens=99, temperature=0, repetition_penalty=1.7),
    SamplingParams(max_tokens=99, temperature=0, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(max_tokens=99, temperature=0, frequency_penalty=-2.0),  # repeats itself: large counts
    SamplingParams(max_tokens=99, temperature=0, logit_bias=((1, 5.0), (50, -100.0), (10**6, 3.0))),
    SamplingParams(max_tokens=99, temperature=0, min_tokens=6, stop_token_ids=STOP, logit_bias=((3, 30.0),)),
    SamplingParams(max_tokens=99, temperature=0.7, top_p=0.8, repetition_penalty=1.2, presence_penalty=0.5,
                   frequency_penalty=0.5, logit_bias=((9, 1.0),), min_tokens=3, stop_token_ids=STOP, seed=9,
                   num_logprobs=5),
    SamplingParams(max_tokens=99, temperature=1.0, top_p=0.0, seed=3),
]  # fmt: skip


@pytest.mark.parametrize("params", ALL_KINDS, ids=range(len(ALL_KINDS)))
def test_alone(params: SamplingParams) -> None:
    sampler = make_sampler()
    story = Story(1, params)
    start = 0
    for _ in range(12):
        sampled = run_step(sampler, [(story, story.row(2, start, new=start == 0))])
        assert sampled.token_ids.tolist() == [story.expected()]
        start = len(story.tokens)
        story.tokens.append(story.expected())


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_batched_chunked_and_preempted(seed: int, pending: bool) -> None:
    """Random histories: whoever is in a step, in chunks, resumed in other slots; the tokens stay those of the model."""
    rng = np.random.default_rng(seed)
    sampler = make_sampler()
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in ALL_KINDS]
    waiting = [Story(i, params, prompt) for i, (params, prompt) in enumerate(zip(ALL_KINDS, prompts, strict=True))]
    running: dict[int, tuple[Story, int]] = {}  # slot -> (story, tokens computed)
    fresh: set[int] = set()
    decoding: set[int] = set()
    free_slots = list(range(8))
    for _ in range(80):
        if running and rng.random() < 0.15:
            slot = int(rng.choice(list(running)))
            waiting.append(running.pop(slot)[0])
            free_slots.append(slot)
            decoding.discard(slot)
        while waiting and free_slots and rng.random() < 0.7:
            story = waiting.pop(int(rng.integers(len(waiting))))
            slot = free_slots.pop(int(rng.integers(len(free_slots))))
            cached = int(rng.integers(len(story.tokens)))  # found in the prefix cache
            running[slot] = (story, cached)
            fresh.add(slot)
        rows: list[tuple[Story, ScheduledSequence]] = []
        for slot, (story, start) in running.items():
            if len(story.tokens) >= 60 or rng.random() < 0.2:
                continue
            end = int(rng.integers(start + 1, len(story.tokens) + 1))
            samples = end == len(story.tokens)
            in_flight = pending and slot in decoding  # the slot itself sampled the one token that the row computes
            row = story.row(slot, start, end=end, new=slot in fresh, samples=samples, pending=in_flight)
            rows.append((story, row))
            running[slot] = (story, end)
            fresh.discard(slot)
            if samples:
                decoding.add(slot)
        sampling = [story for story, row in rows if row.samples]
        if not sampling:
            observe(sampler, [row for _, row in rows])
            continue
        sampled = run_step(sampler, rows)
        assert sampled.token_ids.tolist() == [story.expected() for story in sampling]
        for story in sampling:
            story.tokens.append(story.expected())
    assert sum(len(story.tokens) for story, _ in running.values()) > 100


def test_pending_tokens_are_counted() -> None:
    """With two steps in flight the host has not seen the last token when the next one is sampled."""
    params = SamplingParams(max_tokens=99, temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    sampler = make_sampler()
    story = Story(1, params)
    for step in range(20):
        start = 0 if step == 0 else len(story.tokens) - 1
        sampled = run_step(sampler, [(story, story.row(0, start, new=step == 0, pending=step > 0))])
        assert sampled.token_ids.tolist() == [story.expected()]
        story.tokens.append(story.expected())


def test_more_penalised_sequences_than_the_state_was_made_for() -> None:
    sampler = make_sampler(max_num_seqs=32)
    params = SamplingParams(max_tokens=9, temperature=0, repetition_penalty=2.0, frequency_penalty=1.0)
    stories = [Story(i, params, prompt=(i, i + 1)) for i in range(32)]
    for step in range(5):
        rows = [(s, s.row(s.number, 0 if step == 0 else len(s.tokens) - 1, new=step == 0)) for s in stories]
        assert run_step(sampler, rows).token_ids.tolist() == [s.expected() for s in stories]
        for s in stories:
            s.tokens.append(s.expected())


@pytest.mark.parametrize("scratch", [0, 48 * 70, 2**20])
def test_rows_of_very_different_lengths_are_penalised_apart(monkeypatch: pytest.MonkeyPatch, scratch: int) -> None:
    """Whatever memory there is for it; no row is looked at over the length of one much longer."""
    monkeypatch.setattr(penalties, "PENALTY_SCRATCH_BYTES", scratch)
    params = SamplingParams(max_tokens=9, temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
    rng = np.random.default_rng(0)
    lengths = (3, 900, 5, 400, 60, 300, 4)
    stories = [Story(i, params, rng.integers(0, VOCAB, n).tolist()) for i, n in enumerate(lengths)]
    sampler = make_sampler(max_length=1000)
    for step in range(3):
        rows = [(s, s.row(s.number, 0 if step == 0 else len(s.tokens) - 1, new=step == 0)) for s in stories]
        assert run_step(sampler, rows).token_ids.tolist() == [s.expected() for s in stories]
        for s in stories:
            s.tokens.append(s.expected())


def test_no_row_is_looked_at_over_the_length_of_one_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert penalties._chunks([7]) == ((0, 1, 7),)
    assert penalties._chunks([2, 200, 250, 900, 1000, 4000]) == ((0, 3, 250), (3, 5, 1000), (5, 6, 4000))
    monkeypatch.setattr(penalties, "PENALTY_SCRATCH_BYTES", 48 * 1000)
    assert penalties._chunks([400, 500, 500, 1200]) == ((0, 2, 500), (2, 3, 500), (3, 4, 1200))


def test_the_state_of_penalties_grows_to_what_the_profile_reserves() -> None:
    params = SamplingParams(max_tokens=9, temperature=0, repetition_penalty=2.0)
    sampler = make_sampler(max_num_seqs=11)
    assert sampler.penalty_bytes == 0
    for i in range(11):
        story = Story(i, params)
        run_step(sampler, [(story, story.row(i, 0, new=True))])
    assert sampler.penalty_bytes == penalty_state_bytes(11, vocab_size=VOCAB, max_length=64)


def test_a_slot_forgets_its_last_sequence() -> None:
    sampler = make_sampler()
    heavy = SamplingParams(
        max_tokens=9, temperature=1.0, seed=1, repetition_penalty=3.0, logit_bias=((5, 100.0),), min_tokens=9,
        stop_token_ids=STOP, num_logprobs=3,
    )  # fmt: skip
    first, second = Story(1, heavy), Story(2, SamplingParams(max_tokens=9, temperature=0))
    run_step(sampler, [(first, first.row(0, 0, new=True))])
    sampled = run_step(sampler, [(second, second.row(0, 0, new=True))])
    assert sampled.token_ids.tolist() == [int(second.logits().argmax())]
    assert sampled.logprobs is None


@pytest.mark.parametrize("params", ALL_KINDS, ids=range(len(ALL_KINDS)))
@pytest.mark.parametrize("poison", ["one nan", "all nan", "all -inf", "+inf"])
def test_only_the_row_with_bad_logits_fails(poison: str, params: SamplingParams) -> None:
    sampler = make_sampler()
    stories = [Story(i, params) for i in range(3)]
    rows = [(story, story.row(story.number, 0, new=True)) for story in stories]
    observe(sampler, [row for _, row in rows])
    logits = np.stack([story.logits() for story in stories])
    if poison == "one nan":
        logits[1, 17] = np.nan
    elif poison == "+inf":
        logits[1, 17] = np.inf
    else:
        logits[1] = np.nan if poison == "all nan" else -np.inf
    sampled = sampler.sample(torch.from_numpy(logits), np.arange(3), np.full(3, 3))
    assert sampled.token_ids.tolist() == [stories[0].expected(), INVALID_TOKEN, stories[2].expected()]


def test_single_logits_of_minus_infinity_are_fine() -> None:
    sampler = make_sampler()
    story = Story(1, SamplingParams(max_tokens=9, temperature=1.0, seed=1))
    observe(sampler, [story.row(0, 0, new=True)])
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 41] = -3
    assert sampler.sample(torch.from_numpy(logits), np.zeros(1, np.int64), np.full(1, 3)).token_ids.tolist() == [41]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_logprobs_are_of_processed_logits_before_temperature(temperature: float) -> None:
    sampler = make_sampler()
    numbers = (None, 0, 5, 20)
    stories = [
        Story(i, SamplingParams(max_tokens=9, temperature=temperature, seed=i, num_logprobs=n, presence_penalty=i / 2,
                                repetition_penalty=1.5, min_tokens=2, stop_token_ids=STOP))
        for i, n in enumerate(numbers)
    ]  # fmt: skip
    sampled = run_step(sampler, [(s, s.row(s.number, 0, new=True)) for s in stories])
    assert sampled.token_ids.tolist() == [s.expected() for s in stories]
    got = sampled.logprobs
    assert got is not None
    assert got.rows.tolist() == [1, 2, 3]
    assert got.num_top.tolist() == [0, 5, 20]
    for r, story in enumerate(stories[1:]):
        reference = story.logprobs()
        assert float(got.chosen[r]) == pytest.approx(reference[story.expected()], abs=1e-5)
        best = np.argsort(-reference, kind="stable")[: got.num_top[r]]
        assert got.top_ids[r, : got.num_top[r]].tolist() == best.tolist()
        assert got.top_values[r, : got.num_top[r]].numpy() == pytest.approx(reference[best], abs=1e-5)


def test_more_logprobs_than_tokens() -> None:
    sampler = Sampler(
        vocab_size=4, max_num_seqs=1, max_length=9, device=torch.device("cpu"), sample=load("reference").sample
    )
    new = NewSequence(SamplingParams(max_tokens=1, temperature=0, num_logprobs=20), 1, ())
    observe(sampler, [ScheduledSequence("a", 0, 0, (1,), (), True, new)])
    logprobs = sampler.sample(torch.zeros(1, 4), np.zeros(1, np.int64), np.ones(1, np.int64)).logprobs
    assert logprobs is not None
    assert logprobs.top_values.tolist() == [pytest.approx([math.log(1 / 4)] * 4)]
