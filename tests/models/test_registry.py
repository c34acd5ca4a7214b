"""The table of families agrees with the readings of config.json."""

from __future__ import annotations

import pytest

from aserve.core import model_spec
from aserve.core.errors import ModelLoadError
from aserve.models.registry import ARCHITECTURES, model_class
from aserve.quantization.registry import load_scheme


def test_every_architecture_has_a_class_and_a_reading() -> None:
    assert set(ARCHITECTURES) == set(model_spec.ARCHITECTURES)
    for architecture in ARCHITECTURES:
        assert callable(model_class(architecture))


def test_an_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ModelLoadError, match=r"GPT2LMHeadModel is not supported; known: LlamaForCausalLM, Mistral"):
        model_class("GPT2LMHeadModel")


def test_an_unknown_quantisation_is_named() -> None:
    assert load_scheme(None).method_for("lm_head") is not load_scheme(None).method_for("lm_head")
    with pytest.raises(ModelLoadError, match="quantized with 'awq'"):
        load_scheme("awq")
