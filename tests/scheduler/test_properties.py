"""Random histories: whatever is added, cancelled, shared, chunked, preempted and overlapped, S1 to S11 hold."""

from __future__ import annotations

import hypothesis.strategies as st
from driver import Driver, capacity, request
from hypothesis import note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

PROMPTS = ["abcdefgh" * 6, "abcdefgh" * 2 + "xyz" * 8, "xyz" * 20, "a" * 60]
LETTERS = tuple(range(97, 123))


class History(RuleBasedStateMachine):
    """Calls in any order, at a pool size that keeps it full most of the time."""

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4, 7]),
        max_num_seqs=st.integers(1, 4),
        max_batch_tokens=st.integers(1, 24),
        max_in_flight=st.integers(1, 2),
        policy=st.sampled_from(["fcfs", "priority", "shortest-prefill"]),
        aging_steps=st.sampled_from([1, 3, 100]),
        prefix_lookahead=st.sampled_from([0, 0, 1, 3]),
        prefix_cache=st.booleans(),
    )
    def start(self, policy, aging_steps, prefix_lookahead, prefix_cache, **sizes) -> None:
        self.driver = Driver(
            capacity(**sizes),
            policy=policy,
            aging_steps=aging_steps,
            prefix_lookahead=prefix_lookahead,
            prefix_cache=prefix_cache,
        )
        self.count = 0

    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        stops=st.sets(st.sampled_from(LETTERS), max_size=2),
        salt=st.sampled_from([b"", b"", b"s"]),
    )
    def add(self, prompt, length, max_tokens, priority, stops, salt) -> None:
        limit = self.driver.capacity.max_length
        length = min(length, limit - 1)
        if length < 1:
            return
        self.count += 1
        self.driver.add(
            request(
                f"r{self.count}",
                prompt[:length],
                min(max_tokens, self.driver.capacity.max_new_tokens(length)),
                arrival=self.count,
                priority=priority,
                stop=tuple(sorted(stops)),
                salt=salt,
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


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
