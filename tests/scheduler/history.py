"""Random histories of calls, at a pool size that keeps it full most of the time; one machine for tests and mutants."""

from __future__ import annotations

import hypothesis.strategies as st
from driver import Driver, capacity, request
from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from aserve.core.capacity import Capacity

PROMPTS = ["abcdefgh" * 6, "abcdefgh" * 2 + "xyz" * 8, "xyz" * 20, "a" * 60]
LETTERS = tuple(range(97, 123))
FULL = ((None,),)
WINDOWED = ((None, 5), (None, 3, 3), (6,), (None, 1, 8), (None, 12), (4, 9))


def places(capacity: Capacity, num_extra: int) -> Capacity:
    """The same capacity with enough blocks for one short sequence, and some more."""
    needed = capacity.num_blocks_for(2 * capacity.block_size)
    return Capacity(
        num_blocks=needed + num_extra,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_batch_tokens=capacity.max_batch_tokens,
        max_model_len=80,
        max_in_flight=capacity.max_in_flight,
        windows=capacity.windows,
        num_host_blocks=capacity.num_host_blocks,
        parity_context=capacity.parity_context,
    )


class History(RuleBasedStateMachine):
    """Calls in any order. ``finish`` at the end holds every request against its run alone."""

    windows: tuple[tuple[int | None, ...], ...] = FULL + WINDOWED
    num_host_blocks: tuple[int, ...] = (0, 0, 1, 3, 12)
    driver_class: type[Driver] = Driver

    @initialize(data=st.data())
    def start(self, data) -> None:
        draw = data.draw
        size = capacity(
            100,
            draw(st.sampled_from([1, 2, 4, 7]), "block_size"),
            max_num_seqs=draw(st.integers(1, 5), "max_num_seqs"),
            max_batch_tokens=draw(st.integers(1, 24), "max_batch_tokens"),
            max_in_flight=draw(st.integers(1, 2), "max_in_flight"),
            windows=draw(st.sampled_from(self.windows), "windows"),
            num_host_blocks=draw(st.sampled_from(self.num_host_blocks), "num_host_blocks"),
            parity_context=draw(st.sampled_from([None, 1, 20]), "parity_context"),
        )
        self.driver = self.driver_class(
            places(size, draw(st.integers(0, 14), "extra blocks")),
            policy=draw(st.sampled_from(["fcfs", "priority", "shortest-prefill"]), "policy"),
            aging_steps=draw(st.sampled_from([1, 3, 100]), "aging_steps"),
            prefix_lookahead=draw(st.sampled_from([0, 0, 1, 3]), "prefix_lookahead"),
            prefix_cache=draw(st.sampled_from([True, True, True, False]), "prefix_cache"),
        )
        self.count = 0

    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        stops=st.sets(st.sampled_from(LETTERS), max_size=2),
        salt=st.sampled_from([b"", b"", b"s"]),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        constrained=st.sampled_from([False, False, True]),
    )
    def add(self, prompt, length, max_tokens, priority, stops, salt, choices, constrained) -> None:
        """One request, or several with one prompt, as ``n`` choices are."""
        length = min(length, self.driver.capacity.max_length - 1)
        for _ in range(choices if length else 0):
            self._add(
                tuple(prompt[:length].encode()),
                max_tokens,
                priority=priority,
                stops=stops,
                salt=salt,
                constrained=constrained,
            )

    @precondition(lambda self: self.driver.finished_names())
    @rule(data=st.data(), max_tokens=st.integers(1, 8))
    def add_next_turn(self, data, max_tokens) -> None:
        """A prompt that begins with an earlier prompt and its answer."""
        name = data.draw(st.sampled_from(self.driver.finished_names()))
        before = self.driver.requests[name]
        answer = tuple(event.token_id for event in self.driver.events[name] if event.token_id >= 0)
        prompt = (*before.prompt_token_ids, *answer, 120)[: self.driver.capacity.max_length - 1]
        if prompt:
            self._add(prompt, max_tokens, salt=before.cache_salt)

    def _add(self, prompt, max_tokens, *, priority=0, stops=(), salt=b"", constrained=False) -> None:
        self.count += 1
        self.driver.add(
            request(
                f"r{self.count}",
                prompt,
                min(max_tokens, self.driver.capacity.max_new_tokens(len(prompt))),
                arrival=self.count,
                priority=priority,
                stop=tuple(sorted(stops)),
                salt=salt,
                constrained=constrained,
            )
        )

    @precondition(lambda self: self.driver.live())
    @rule(data=st.data())
    def cancel(self, data) -> None:
        self.driver.cancel(data.draw(st.sampled_from(self.driver.live())))

    @rule(name=st.sampled_from(["r1", "r2", "nobody"]))
    def cancel_again(self, name) -> None:
        """A cancel of what is gone, or never was, changes nothing."""
        if name not in self.driver.live():
            self.driver.scheduler.cancel(name)

    @precondition(lambda self: self.driver.live())
    @rule(data=st.data())
    def fail(self, data) -> None:
        """The next logits of one request are not finite."""
        self.driver.fail(data.draw(st.sampled_from(self.driver.live())))

    @rule()
    def reset(self) -> None:
        self.driver.reset()

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @rule(steps=st.integers(1, 8))
    def run(self, steps) -> None:
        for _ in range(steps):
            self.driver.step()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            note(repr(self.driver.capacity))
            self.driver.finish()
            self.driver.check_replay()
