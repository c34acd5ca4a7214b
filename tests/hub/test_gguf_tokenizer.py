"""Tokenizers made from GGUF vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.errors import ModelLoadError
from aserve.hub.gguf_convert import convert_gguf
from aserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(gguf: Any, vocabulary: Any, architecture: str = "llama", **options: Any) -> Tokenizer:
        root = tmp_path_factory.mktemp("gguf")
        numbers: dict[str, Any] = dict(gguf.LLAMA)
        tensors = gguf.llama_tensors(len(vocabulary.tokens))
        if architecture == "gemma3":
            numbers["attention.sliding_window"] = 8
            tensors |= {
                f"blk.{n}.{part}.weight": tensors[f"blk.{n}.attn_norm.weight"]
                for n in range(2)
                for part in ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
            }
        gguf.write_gguf(root / "m.gguf", architecture, numbers, tensors, vocabulary, **options)
        (root / "model").mkdir()
        convert_gguf(root / "m.gguf", root / "model")
        return Tokenizer.load(root / "model")

    return make


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, **options)]


def test_smollm(gguf: Any, make: Any) -> None:
    tokenizer = make(gguf, gguf.byte_level())
    assert tokenizer.stop_token_ids == (0, 2)
    assert pieces(tokenizer, "the 123 the") == ["the", " ", "1", "2", "3", " the"]
    assert pieces(tokenizer, "<|im_start|>the<|im_end|><tool>") == ["<|im_start|>", "the", "<|im_end|>", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<|im_end|><tool>")) == "a<tool>"
    prompt = tokenizer.encode_chat([{"role": "user", "content": "a"}])
    shown = tokenizer.decode(prompt, skip_special_tokens=False)
    assert shown == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt[0], prompt.count(1), prompt.count(2)) == (1, 2, 1)


@given(text=st.text(max_size=30))
def test_byte_level_loses_nothing(loaded: Tokenizer, text: str) -> None:
    assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def loaded(gguf: Any, make: Any) -> Tokenizer:
    return make(gguf, gguf.byte_level())


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("qwen2", ["1", "2", "3"]),
        ("deepseek-r1-qwen", ["1", "2", "3"]),
        ("tekken", ["1", "2", "3"]),
        ("llama-bpe", ["123"]),
        ("gpt-2", ["123"]),
        ("default", ["123"]),
    ],
)
def test_text_is_split_as_the_vocabulary_was_made(gguf: Any, make: Any, pre: str, expected: list[str]) -> None:
    assert pieces(make(gguf, gguf.byte_level(pre)), "123", add_special_tokens=False) == expected


def test_bos_is_added_once_where_the_file_says_so(gguf: Any, make: Any) -> None:
    vocabulary = gguf.byte_level("qwen2")
    vocabulary.flags |= {"add_bos_token": True, "add_eos_token": True}
    tokenizer = make(gguf, vocabulary)
    assert pieces(tokenizer, "the") == ["<|im_start|>", "the", "<|im_end|>"]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(1) == 2


def test_sentencepiece_with_prefix_space(gguf: Any, make: Any) -> None:
    tokenizer = make(gguf, gguf.sentencepiece(), template=None)
    assert pieces(tokenizer, "the the") == ["<s>", " the", " the"]
    assert tokenizer.decode(tokenizer.encode("the é😀the")) == "the é😀the"
    assert tokenizer.stop_token_ids == (2,)
    assert tokenizer.chat_template is None


def test_gemma(gguf: Any, make: Any) -> None:
    """No prefix space, merges in the order of the vocabulary, spaces spelled as spaces."""
    tokenizer = make(gguf, gguf.sentencepiece(prefix=False), "gemma3")
    assert pieces(tokenizer, "the  the") == ["<s>", "the", "  ", "the"]
    assert tokenizer.decode(tokenizer.encode(" é😀 the")) == " é😀 the"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: setattr(v, "pre", "unheard-of"), "text splitting 'unheard-of' is not known"),
        (lambda v: setattr(v, "model", "bert"), "tokenizers of kind 'bert' cannot be converted"),
        (lambda v: v.merges.append("no pe"), "its vocabulary is damaged"),
        (lambda v: v.merges.append("nope"), "its vocabulary is damaged"),
    ],
)
def test_a_vocabulary_that_is_not_understood(gguf: Any, make: Any, change: Any, message: str) -> None:
    vocabulary = gguf.byte_level()
    change(vocabulary)
    with pytest.raises(ModelLoadError, match=message) as caught:
        make(gguf, vocabulary)
    assert "\n" not in caught.value.message
