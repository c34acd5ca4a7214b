"""Rotary position embedding."""

import math

import pytest
import torch

from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import TOLERANCES, assert_agree

OPERATION = OPERATIONS["rotary"]


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_the_reference_turns_each_pair_of_channels(reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype)
    half = inputs["cos_sin"].shape[1] // 2
    expected = {}
    for name in ("q", "k"):
        x = inputs[name].double().clone()
        angles = inputs["cos_sin"].double()[inputs["positions"]].unsqueeze(1)
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(
            angles[..., :half], angles[..., half:]
        )
        x[..., :half], x[..., half : 2 * half] = turned.real, turned.imag
        expected[name] = x
    reference.rotary(**inputs)
    tolerance = TOLERANCES[dtype]
    for name, x in expected.items():
        torch.testing.assert_close(inputs[name].double(), x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_agree_with_the_reference(backend, reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    assert_agree(OPERATION, backend.kernels, reference, inputs)


def test_values_beside_q_and_k_are_left_alone(backend, dtype):
    qkv = torch.ones(3, 5, 8, dtype=dtype, device=backend.device)
    quarter_turn = torch.tensor([[0.0] * 4 + [1.0] * 4], device=backend.device)
    positions = torch.zeros(3, dtype=torch.int64, device=backend.device)
    backend.kernels.rotary(qkv[:, :2], qkv[:, 2:4], positions, quarter_turn)
    assert qkv[:, :4].tolist() == [[[-1.0] * 4 + [1.0] * 4] * 4] * 3
    assert qkv[:, 4].tolist() == [[1.0] * 8] * 3


def test_scores_depend_on_the_distance_alone(backend):
    inverse = torch.tensor([1.0, 0.1, 0.01, 0.001])
    angles = torch.arange(64).unsqueeze(1) * inverse
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(backend.device)
    vector = torch.linspace(-1, 1, 8, device=backend.device).expand(2, 1, 8)
    scores = []
    for position in (0, 20):
        q, k = vector.clone(), vector.clone()
        positions = torch.tensor([position, position + 7], device=backend.device)
        backend.kernels.rotary(q, k, positions, table)
        scores.append(float(q[1, 0] @ k[0, 0]))
    assert math.isclose(*scores, rel_tol=1e-5)
