"""Matrices in a backend's own form: the product is that of the plain matrix, whatever the sizes."""

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
