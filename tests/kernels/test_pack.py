"""Matrices in a backend's own form: the product is that of the plain matrix, whatever the sizes."""

import math

import pytest
import torch
from torch.nn import functional

from aserve_kernels import load
from aserve_kernels.cpu import TORCH_KERNELS
from tests.kernels.conftest import NATIVE, native_backend

SIZES = ((96, 64), (33, 32), (7, 40), (65, 100))


@pytest.fixture(params=["native", "native-without-amx", "torch"])
def pack(request):
    kernels = native_backend(request.param) if request.param in NATIVE else TORCH_KERNELS

    def pack(weight):
        packed = kernels.pack(weight)
        if packed is None and weight.dtype == torch.bfloat16:
            pytest.skip("nothing on this machine multiplies bfloat16")
        return packed

    return pack


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 49, 64, 71, 300, 1100])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_product_is_that_of_the_plain_matrix(pack, size, tokens):
    weight, bias = draw(*size), draw(size[0])
    packed = pack(weight)
    x = draw(tokens, size[1])
    for b in (None, bias):
        result = packed(x, b)
        expected = functional.linear(x.double(), weight.double(), None if b is None else b.double())
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.double(), expected, rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_input_may_have_any_strides(pack, size):
    packed = pack(draw(*size))
    wide = draw(19, 2 * size[1] + 6)
    for x in (wide[:, : size[1]], wide[:, : 2 * size[1] : 2], wide.T[: size[1]].T[:5]):
        torch.testing.assert_close(packed(x, None), packed(x.clone(), None))


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_row_with_nan_stays_alone(pack, tokens):
    packed = pack(draw(33, 40))
    x = draw(tokens, 40)
    expected = packed(x, None)
    x[1, 7] = float("nan")
    result = packed(x, None)
    assert result[1].isnan().all()
    others = torch.arange(tokens) != 1
    torch.testing.assert_close(result[others], expected[others])


def test_the_matrix_is_not_needed_any_more(pack):
    weight = draw(64, 64)
    packed, x = pack(weight), draw(4, 64)
    expected = packed(x, None)
    weight.fill_(float("nan"))
    assert torch.equal(packed(x, None), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_plain(pack, dtype):
    assert pack(draw(64, 64).to(dtype)) is None


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_backends_without_a_form_of_their_own_keep_it_plain(name):
    assert load(name).pack(draw(64, 64)) is None


def on_grids(rows, columns, steps=None, offsets=None):
    """A matrix as it comes from a checkpoint in GGUF's Q4_1."""
    generator = torch.Generator().manual_seed(rows)
    q = torch.randint(0, 16, (rows, columns // 32, 32), generator=generator).float()
    q[..., 0], q[..., 1] = 0, 15
    shape = (rows, columns // 32, 1)
    steps = torch.rand(shape, generator=generator).mul(0.1) if steps is None else torch.full(shape, steps)
    spread = torch.rand(shape, generator=generator) * -15 * steps  # the grid has both signs
    offsets = spread if offsets is None else torch.full(shape, offsets)
    return (q * steps.half().float() + offsets.half().float()).flatten(1).bfloat16()


GRIDS = {
    "random": {},
    "of zero": {"steps": 0.0, "offsets": 0.0},
    "of one value": {"steps": 0.0, "offsets": -3.0},
    "around zero": {"steps": 0.125, "offsets": -1.0},
    "of tiny steps": {"steps": 1e-6, "offsets": 0.0},
    "of large numbers": {"steps": 1000.0, "offsets": -8000.0},
    "far from zero": {"steps": 0.5, "offsets": 100.0},
}


@pytest.fixture(params=["native", "native-without-amx"])
def native_pack(request):
    kernels = native_backend(request.param)
    if kernels.pack(draw(32, 32)) is None or TORCH_KERNELS.pack is kernels.pack or "," not in kernels.form:
        pytest.skip("no bfloat16 products of its own on this machine")
    return kernels.pack


@pytest.mark.parametrize("tokens", [1, 9, 40, 600])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("size", [(96, 64), (17, 32), (50, 96)], ids=str)
def test_a_matrix_on_grids_takes_5_bits_and_gives_the_same_to_the_last_bit(
    native_pack, monkeypatch, size, grid, tokens
):
    weight, bias, x = on_grids(*size, **GRIDS[grid]), draw(size[0]), draw(tokens, size[1])
    packed = native_pack(weight)
    assert packed.num_bytes * 8 == -(-size[0] // 32) * 32 * size[1] * 5
    monkeypatch.setattr("aserve_kernels.cpu.native.matmul._MOST_GRID_COLUMNS", 0)
    plain = native_pack(weight)
    assert plain.num_bytes == -(-size[0] // 32) * 32 * size[1] * 2
    assert torch.equal(packed(x, bias), plain(x, bias))


def changed(weight, value):
    weight = weight.clone()
    weight[5, 40] = value
    return weight


@pytest.mark.parametrize(
    "weight",
    [
        draw(64, 64),
        changed(on_grids(64, 64), math.nan),
        changed(on_grids(64, 64), math.inf),
        changed(on_grids(64, 64), 7e4),
        changed(on_grids(64, 64, steps=0.125, offsets=-1.0), 0.126),
    ],
    ids=["random", "nan", "inf", "beyond float16", "one number beside its grid"],
)
def test_a_matrix_in_which_a_number_would_change_keeps_its_16_bits(native_pack, weight):
    packed = native_pack(weight)
    assert packed.num_bytes == 64 * 64 * 2
    x = draw(3, 64)
    torch.testing.assert_close(packed(x, None), functional.linear(x, weight), equal_nan=True, rtol=2e-2, atol=2e-2)
