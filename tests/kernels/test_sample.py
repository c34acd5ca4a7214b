"""Sampling."""

import math

import pytest
import torch

from aserve_kernels import load
from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import assert_agree

OPERATION = OPERATIONS["sample"]


def call(kernels, logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniforms=(0.5,), device="cpu"):
    """Sample from the same logits once per uniform."""
    rows = len(uniforms)
    return kernels.sample(
        torch.as_tensor(logits, dtype=torch.float32, device=device).expand(rows, -1).contiguous(),
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
        torch.as_tensor(uniforms, dtype=torch.float32, device=device),
    ).tolist()


def kept_probabilities(logits, temperature, top_k, top_p, min_p):
    """The distribution of the contract, in float64 and with lists."""
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < top_k < len(logits):
        ranked = ranked[:top_k]
    mass, cumulative, kept = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if kept and top_p < 1 and cumulative >= top_p * mass:
            break
        kept.append(i)
        cumulative += weights[i]
    kept = [i for i in kept if weights[i] >= min_p * weights[ranked[0]]]
    mass = sum(weights[i] for i in kept)
    return {i: weights[i] / mass for i in kept}


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.0, 4, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.9, 9, 0.7, 0.05),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_evenly_spread_uniforms_give_exactly_the_distribution(name, setting):
    """With n uniforms in the middles of n equal cells, each count is within 1 of n times the probability."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)).mul(2).tolist()
    temperature, top_k, top_p, min_p = setting
    n = 4000
    uniforms = (torch.arange(n) + 0.5) / n
    tokens = call(load(name), logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniforms=uniforms)
    probabilities = kept_probabilities(logits, *setting)
    assert set(tokens) <= set(probabilities)
    for token, probability in probabilities.items():
        assert abs(tokens.count(token) - n * probability) <= 1 + n * 1e-6


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_draw_what_the_reference_draws(backend, reference, dtype, shape):
    for seed in range(1 if backend.interpreted else 10):
        inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device, seed=seed)
        if backend.interpreted:  # a third of the settings with each shape and dtype
            first = (OPERATION.shapes.index(shape) + (dtype == torch.float32)) % 3
            inputs = {name: x[first::3].contiguous() for name, x in inputs.items()}
        assert_agree(OPERATION, backend.kernels, reference, inputs)


@pytest.mark.parametrize("setting", [(1.0, 0, 0.97, 0.0), (1.0, 3000, 1.0, 0.0), (1.0, 0, 1.0, 1e-4)], ids=str)
def test_filters_that_keep_most_of_the_vocabulary(reference, dtype, setting):
    """The CPU looks at a few of the largest logits first, and has to go on."""
    shape = {"rows": 5, "vocab": 9000, "spread": 1.0, "setting": setting}
    inputs = make_inputs(OPERATION, shape, dtype=dtype)
    assert_agree(OPERATION, load("cpu"), reference, inputs)


@pytest.mark.parametrize("shape", OPERATION.shapes[:2], ids=str)
def test_a_row_does_not_depend_on_its_batch(backend, shape):
    if backend.interpreted:
        pytest.skip("slow, and the interpreter runs one row after the other")
    inputs = make_inputs(OPERATION, shape, dtype=torch.bfloat16, device=backend.device, seed=5)
    together = backend.kernels.sample(**inputs)
    for rows in (slice(2, 3), slice(4, 11), slice(0, 1)):
        assert torch.equal(backend.kernels.sample(**{name: x[rows] for name, x in inputs.items()}), together[rows])


def test_temperature_0_takes_the_first_of_the_largest(backend, reference):
    for kernels, device in ((backend.kernels, backend.device), (reference, backend.device)):
        assert call(kernels, [1.0, 3.0, 2.0, 3.0], temperature=0.0, device=device) == [1]
        assert call(kernels, [-5.0] * 300, temperature=0.0, uniforms=[0.99], device=device) == [0]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("setting", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.01)], ids=str)
def test_masked_tokens_are_never_drawn(backend, reference, uniform, setting):
    top_k, top_p, min_p = setting
    logits = [-math.inf, 1.0, -math.inf, 0.0, -math.inf]
    for kernels, device in ((backend.kernels, backend.device), (reference, backend.device)):
        [token] = call(kernels, logits, top_k=top_k, top_p=top_p, min_p=min_p, uniforms=[uniform], device=device)
        assert token in {1, 3}


def test_equal_logits_are_ranked_by_id(backend, reference):
    logits = [0.0] * 200
    for kernels, device in ((backend.kernels, backend.device), (reference, backend.device)):
        uniforms = [0.0, 0.3, 0.9]
        assert call(kernels, logits, top_k=4, uniforms=uniforms, device=device) == [0, 1, 3]
        assert call(kernels, logits, top_p=0.019, uniforms=uniforms, device=device) == [0, 1, 3]


def test_negative_zero_equals_zero(backend, reference):
    for kernels, device in ((backend.kernels, backend.device), (reference, backend.device)):
        assert call(kernels, [-1.0, -0.0, 0.0], top_k=1, device=device) == [1]
        assert call(kernels, [-1.0, -0.0, 0.0], temperature=0.0, device=device) == [1]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_tiny_temperatures_do_not_overflow(backend, reference):
    for kernels, device in ((backend.kernels, backend.device), (reference, backend.device)):
        assert call(kernels, [10.0, 30.0, 20.0], temperature=1e-38, device=device) == [1]
        assert call(kernels, [10.0, 30.0, 20.0], temperature=1e-38, top_p=0.9, device=device) == [1]


@pytest.mark.parametrize("setting", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.9)], ids=str)
def test_a_row_of_nan_spoils_no_other_row(setting):
    """The model runner reports such rows; the sampler has to survive them."""
    temperature, top_k, top_p = setting
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    arguments = (
        torch.full((3,), temperature),
        torch.full((3,), top_k, dtype=torch.int32),
        torch.full((3,), top_p),
        torch.zeros(3),
        torch.full((3,), 0.4),
    )
    kernels = load("cpu")
    expected = kernels.sample(logits, *arguments)
    logits[1] = math.nan
    tokens = kernels.sample(logits, *arguments)
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= int(tokens[1]) < 200
