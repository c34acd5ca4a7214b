"""Requests from flags and from files: what is drawn, what is read, what is refused and how."""

from __future__ import annotations

from random import Random

import pytest

from aserve.core.config import CacheConfig, SchedulerConfig
from aserve.core.errors import ConfigError
from aserve.simulate import MachineConfig, Setup, TraceConfig, TraceRequest
from aserve.simulate.compare import variants
from aserve.simulate.lengths import Lengths
from aserve.simulate.trace import parse_trace, random_trace


def test_lengths_are_drawn_from_the_distribution_named() -> None:
    random = Random(1)
    draws = {
        text: sorted(Lengths.parse(text, flag="--x").draw(random) for _ in range(999))
        for text in ("7", "uniform:5:8", "lognormal:100:1", "lognormal:100:3:250")
    }
    assert set(draws["7"]) == {7}
    assert set(draws["uniform:5:8"]) == {5, 6, 7, 8}
    assert 80 < draws["lognormal:100:1"][499] < 120
    assert draws["lognormal:100:1"][-1] > 500
    assert draws["lognormal:100:3:250"][-1] == 250
    assert draws["lognormal:100:3:250"][0] >= 1


@pytest.mark.parametrize(
    "text",
    ["", "0", "x", "-5", "uniform:5", "uniform:9:5", "uniform:1:2:3", "lognormal:0:1", "lognormal:9:-1",
     "lognormal:9:1:0", "poisson:3:4", "nan", "inf", "lognormal:9:nan", "uniform:1:inf", "lognormal:9:1:inf",
     "lognormal:300:1000", "lognormal:1e300:1", "1e300"],
)  # fmt: skip
def test_what_is_no_length_is_refused(text) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-tokens: .* is no length"):
        TraceConfig(prompt_tokens=text)


@pytest.mark.parametrize(
    ("field", "value"),
    [("requests", 0), ("rate", -1.0), ("rate", float("nan")), ("rate", float("inf")), ("prefix_groups", -1),
     ("priorities", ())],
)  # fmt: skip
def test_a_wrong_number_is_refused_by_its_flag(field, value) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        TraceConfig(**{field: value})


@pytest.mark.parametrize(
    "values", [{"step_ms": -1.0}, {"step_ms": float("nan")}, {"step_ms": 0.0, "host_ms": 0.0}, {"host_blocks": -1},
               {"windows": (-1,)}, {"windows": ()}],
)  # fmt: skip
def test_a_machine_that_cannot_be_is_refused(values) -> None:
    with pytest.raises(ConfigError, match="--"):
        MachineConfig(**values)


def test_arrivals_follow_the_rate() -> None:
    trace = random_trace(TraceConfig(requests=2000, rate=4.0, priorities=(0, 5)))
    assert 450 < trace[-1].arrival_s < 550
    assert [request.priority for request in trace[:4]] == [0, 5, 0, 5]
    at_once = random_trace(TraceConfig(requests=10, rate=0))
    assert {request.arrival_s for request in at_once} == {0.0}


def test_prefixes_are_part_of_their_prompts() -> None:
    config = TraceConfig(requests=50, prefix_groups=2, prefix_tokens="uniform:10:99", prompt_tokens="7")
    trace = random_trace(config)
    assert len({(request.prefix, request.prefix_tokens) for request in trace}) == 2
    assert all(request.prompt_tokens == request.prefix_tokens + 7 for request in trace)


def test_lines_are_read_in_order_of_arrival() -> None:
    lines = [
        '{"arrival_s": 2, "prompt_tokens": 9, "output_tokens": 3, "prefix": 7, "prefix_tokens": 9, "priority": -1}',
        "",
        '{"arrival_s": 0.5, "prompt_tokens": 1, "output_tokens": 1}',
    ]
    assert parse_trace(lines, "t") == (TraceRequest(0.5, 1, 1), TraceRequest(2, 9, 3, "7", 9, -1))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "t line 2: "),
        ("[]", "t line 2: a request is a JSON object"),
        ('{"arrival_s": 1}', "t line 2: prompt_tokens, output_tokens missing"),
        ('{"arrival_s": 1, "prompt_tokens": 1, "output_tokens": 1, "size": 2}', "t line 2: unknown size"),
        ('{"arrival_s": "1", "prompt_tokens": 1, "output_tokens": 1}', "arrival_s must be a number"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s must be a number"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s must be a number"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens must be a whole number"),
        ('{"arrival_s": 1, "prompt_tokens": 1, "output_tokens": true}', "output_tokens must be a whole number"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 3}', "needs a prefix"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 1, "prefix": "a", "prefix_tokens": 6}', "no less"),
    ],
)
def test_a_bad_line_is_named(line, message) -> None:
    good = '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}'
    with pytest.raises(ConfigError) as caught:
        parse_trace([good, line], "t")
    assert message in caught.value.message


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="t has no requests"):
        parse_trace(["", "  "], "t")


def test_a_comparison_makes_every_combination() -> None:
    found = variants(Setup(), ["policy=fcfs,priority", "prefix-cache=on,off", "step_ms=1.5"])
    assert list(found) == [
        "fcfs prefix_cache=on step_ms=1.5",
        "fcfs prefix_cache=off step_ms=1.5",
        "priority prefix_cache=on step_ms=1.5",
        "priority prefix_cache=off step_ms=1.5",
    ]
    last = found["priority prefix_cache=off step_ms=1.5"]
    assert (last.scheduler.policy, last.cache.prefix_cache, last.machine.step_ms) == ("priority", False, 1.5)
    assert variants(Setup(), []) == {"": Setup()}


@pytest.mark.parametrize(
    ("comparison", "message"),
    [
        ("policy", "is no comparison"),
        ("policy=fcfs,", "is no comparison"),
        ("nothing=1", "no setting 'nothing'"),
        ("policy=best", "'best' is no value for policy"),
        ("block_size=many", "'many' is no value for block_size"),
        ("prefix_cache=maybe", "'maybe' is no value for prefix_cache"),
        ("rate=-1", "--rate"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(comparison, message) -> None:
    with pytest.raises(ConfigError, match=message):
        variants(Setup(), [comparison])


def test_tokens_of_the_cache_count_for_all_groups_as_on_a_server() -> None:
    cache = CacheConfig(kv_cache_tokens=100, block_size=16)
    for windows in ((0,), (0, 512, 512), (512,)):
        capacity = Setup(cache=cache, machine=MachineConfig(windows=windows)).capacity()
        assert capacity.num_blocks == 7 * len(windows)
        assert capacity.num_kv_tokens == 112


def test_a_comparison_may_turn_off_together_what_belongs_together() -> None:
    setup = Setup(scheduler=SchedulerConfig(prefix_lookahead=2))
    (together,) = variants(setup, ["prefix_cache=off", "prefix_lookahead=0"]).values()
    together.check()
    with pytest.raises(ConfigError, match="--prefix-lookahead"):
        variants(setup, ["prefix_cache=off"])["prefix_cache=off"].check()
