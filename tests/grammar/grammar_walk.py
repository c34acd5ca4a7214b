"""A sequence in a slot of its own, advanced by hand or at random through what its grammar allows."""

from __future__ import annotations

import numpy as np

from aserve.core.request import SamplingParams
from aserve.core.step import NewSequence, ScheduledSequence
from aserve.grammar import GrammarSlots, settle
from aserve.testing import EOS

PROMPT = (1, 2, 3)


def first_row(grammar, *, stop=(EOS,), prior=(), token_ids=PROMPT, slot=0, **sampling):
    """The row that begins a sequence of the prompt and perhaps some tokens of its own."""
    params = SamplingParams(max_tokens=10**6, stop_token_ids=stop, grammar=grammar, **sampling)
    new = NewSequence(params, len(PROMPT), prior)
    return ScheduledSequence("r", slot, len(prior), token_ids, ((0,),), True, new)


class Walk:
    """One sequence in a slot of its own, advanced by hand."""

    def __init__(self, compiler, grammar, vocab_size=260, **options):
        self.compiled = compiler.compile(grammar)  # held, so that the slot finds it
        self.slots = GrammarSlots(compiler)
        self.slots.observe(first_row(grammar, **options))
        self.vocab_size = vocab_size
        self.generated: list[int] = []
        self.completed = False

    def allowed(self) -> list[int]:
        matchers = self.slots.matchers([0])
        bits = self.slots.allowed(matchers, [len(PROMPT) + len(self.generated)], self.vocab_size)
        return np.flatnonzero(np.unpackbits(bits[0], bitorder="little")[: self.vocab_size]).tolist()

    def take(self, token_id: int) -> int:
        """Returns the token as it is settled."""
        (settled,), completed = settle((token_id,), [0], self.slots.matchers([0]))
        self.completed = bool(completed)
        self.generated.append(token_id)
        return settled

    def run(self, rng, *, limit=400, ends=(EOS,), closing=b'"}]0 ') -> list[int] | None:
        """Random tokens until it ends, often those that close something; None if it has not by the limit."""
        close = set(closing)
        while len(self.generated) < limit:
            allowed = self.allowed()
            assert allowed, "there is always a way on"
            likely = [i for i in allowed if i in close or i in ends]
            token_id = int(rng.choice(likely if likely and rng.random() < 0.5 else allowed))
            if token_id in ends:
                return self.generated
            assert self.take(token_id) == token_id
            if self.completed:
                return self.generated
        return None
