"""The table of families agrees with the readings of config.json."""

from __future__ import annotations

import pytest

from aserve.core.errors import ModelLoadError
from aserve.core.model_spec import ModelSpec
from aserve.models.registry import ARCHITECTURES, model_class
from aserve.quantization.registry import load_scheme
from aserve_kernels import load


def test_what_is_listed_as_known_has_a_class() -> None:
    with pytest.raises(ModelLoadError) as refused:
        ModelSpec.from_hf({"architectures": ["GPT2LMHeadModel"]})
    assert str(refused.value) == f"architecture GPT2LMHeadModel is not supported; known: {', '.join(ARCHITECTURES)}"
    for architecture in ARCHITECTURES:
        assert callable(model_class(architecture))


def test_an_unknown_quantisation_is_named() -> None:
    scheme, kernels = load_scheme(None), load("reference")
    assert scheme.method_for("lm_head", kernels) is not scheme.method_for("lm_head", kernels)
    with pytest.raises(ModelLoadError, match="quantized with 'awq'"):
        load_scheme("awq")
