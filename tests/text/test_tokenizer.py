"""Encoding, stop ids and settings of model folders, against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from aserve.core.errors import InvalidRequestError, ModelLoadError
from aserve.text.chat_template import RESERVED_OPTIONS
from aserve.text.tokenizer import Tokenizer

Folder = Callable[..., Path]
TEXTS = ["the a", " the  a\n", "", "<|im_start|>user\nthe<|im_end|> the", "é€😀", "</s>the"]
MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": " the a"}]


def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_encodes_as_transformers(folder: Folder, kind: str, bos: bool | None, eos: bool) -> None:
    settings = {"add_bos_token": bos, "add_eos_token": eos} if bos is not None else {}
    path = folder(kind, settings=settings, config={"model_type": "llama"})
    tokenizer, reference = Tokenizer.load(path), theirs(path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"], text
        plain = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False) == plain, text


@pytest.mark.parametrize("texts", [("the a",), ("the the the a",), ("the", " the a the"), ("the the the a", "a the a")])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_inputs_are_cut_as_transformers_cuts_them(folder: Folder, kind: str, texts: tuple[str, ...]) -> None:
    """The longer of two texts first, and special tokens stay; whole by default."""
    path = folder(kind, settings={"add_bos_token": True, "add_eos_token": True}, config={"model_type": "llama"})
    tokenizer, reference = Tokenizer.load(path), theirs(path)
    columns = [[text] for text in texts]
    (whole,) = reference(*columns)["input_ids"]
    assert tokenizer.encode_input(texts)[0] == whole
    for length in range(6, len(whole) + 2):
        (cut,) = reference(*columns, truncation=True, max_length=length)["input_ids"]
        assert tokenizer.encode_input(texts, max_tokens=length)[0] == cut


@pytest.mark.parametrize(
    "tokenizer_class",
    [None, "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "TokenizersBackend", "NoSuchTokenizer"],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_takes_the_class_that_transformers_takes(
    folder: Folder, kind: str, family: str, tokenizer_class: str | None
) -> None:
    if (kind, family, tokenizer_class) == ("byte_level", "gemma3_text", None):
        pytest.skip("transformers makes a tokenizer of it that cannot encode")
    path = folder(
        kind, settings={"tokenizer_class": tokenizer_class, "pad_token": "</s>"}, config={"model_type": family}
    )
    if tokenizer_class is None:
        settings = json.loads((path / "tokenizer_config.json").read_text())
        del settings["tokenizer_class"]
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, reference = Tokenizer.load(path), theirs(path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"], text


@pytest.mark.parametrize("template_bos", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_chat_ids_equal_apply_chat_template(folder: Folder, chatml: str, add_bos: bool, template_bos: bool) -> None:
    template = "{{ bos_token }}" * template_bos + chatml
    path = folder(settings={"add_bos_token": add_bos, "chat_template": template})
    tokenizer, reference = Tokenizer.load(path), theirs(path)
    for prompted in (True, False):
        ids = tokenizer.encode_chat(MESSAGES, add_generation_prompt=prompted)
        assert ids == reference.apply_chat_template(MESSAGES, add_generation_prompt=prompted)["input_ids"]
        assert ids.count(tokenizer.encode("<s>", add_special_tokens=False)[0]) == template_bos


def test_tokenizer_json_alone_is_enough(folder: Folder) -> None:
    tokenizer = Tokenizer.load(folder())
    assert tokenizer.decode(tokenizer.encode("the é")) == "the é"
    assert tokenizer.vocab_size == 1 + max(tokenizer.encode("é!</s>"))
    assert (tokenizer.chat_template, tokenizer.stop_token_ids, dict(tokenizer.generation_defaults)) == (None, (), {})
    with pytest.raises(InvalidRequestError, match=r"no chat template.*/v1/completions.*--chat-template"):
        tokenizer.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3]}, {"eos_token_id": 1}, {"own", 1, 3}),
        ({"eos_token_id": [1, 3]}, {}, {"own", 1, 3}),
        ({"eos_token_id": 3}, {}, {"own", 3}),
        (None, {}, {"own"}),
        (None, {"eos_token_id": [1, 3]}, {"own", 1, 3}),
        ({"eos_token_id": [1, 999999, -1, None, True, "x"]}, {"eos_token_id": None}, {"own", 1}),
    ],
)
def test_every_end_token_counts(folder: Folder, generation: Any, config: Any, expected: set[Any]) -> None:
    tokenizer = Tokenizer.load(folder(settings={}, generation=generation, config={"vocab_size": 400, **config}))
    own = tokenizer.encode("</s>")[0]
    assert tokenizer.stop_token_ids == tuple(sorted(own if i == "own" else i for i in expected))


def test_vocabulary_of_the_model_decides(folder: Folder) -> None:
    path = folder(settings={}, config={"text_config": {"vocab_size": 200, "eos_token_id": [3, 200]}})
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.vocab_size, tokenizer.stop_token_ids) == (200, (3,))
    with pytest.raises(InvalidRequestError, match="'</s>', which the model does not have") as caught:
        tokenizer.encode("the</s>")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "do_sample": True},
            None,
        ),
        ({"temperature": 0, "top_k": 0, "top_p": 1}, None),
        ({"temperature": -1, "top_p": 0, "top_k": 2.5, "min_p": 2, "repetition_penalty": 0}, {}),
        ({"temperature": "hot", "top_p": None, "top_k": True, "min_p": float("nan"), "repetition_penalty": 1e999}, {}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_generation_defaults(folder: Folder, generation: dict[str, Any], expected: dict[str, Any] | None) -> None:
    if expected is None:
        expected = {k: v for k, v in generation.items() if k != "do_sample"}
    assert Tokenizer.load(folder(generation=generation)).generation_defaults == expected


def test_half_a_surrogate_pair_is_refused(folder: Folder, chatml: str) -> None:
    tokenizer = Tokenizer.load(folder(settings={"chat_template": chatml}))
    for text in ("x \ud83d y", "\udcf0"):
        with pytest.raises(InvalidRequestError, match="half of a surrogate pair") as caught:
            tokenizer.encode(text)
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequestError, match="half of a surrogate pair") as caught:
            tokenizer.encode_chat([{"role": "user", "content": text}])
        assert caught.value.param == "messages"


def test_text_that_the_tokenizer_cannot_encode_is_refused(folder: Folder) -> None:
    path = folder()
    stored = json.loads((path / "tokenizer.json").read_text())
    stored["model"] |= {"unk_token": "<none>", "vocab": {"a": 0}, "merges": []}
    (path / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = Tokenizer.load(path)
    with pytest.raises(InvalidRequestError, match=r"prompt cannot be tokenized: .*<none>"):
        tokenizer.encode("b")


def test_truncation_and_padding_of_the_file_are_off(folder: Folder) -> None:
    path = folder()
    stored = json.loads((path / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    stored["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "</s>",
    }
    (path / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = Tokenizer.load(path)
    assert len(tokenizer.encode("a" * 20)) == 20
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "looked for tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read as JSON"),
        ("tokenizer.json", "{}", "cannot be loaded"),
        ("tokenizer_config.json", "", "tokenizer_config.json cannot be read as JSON"),
        ("config.json", "", "config.json cannot be read as JSON"),
        ("config.json", "[]", "config.json must hold a JSON object"),
        ("generation_config.json", "{", "generation_config.json cannot be read as JSON"),
    ],
)
def test_damaged_folders(folder: Folder, file: str, content: str | None, message: str) -> None:
    path = folder(settings={})
    (path / file).unlink(missing_ok=True)
    if content is not None:
        (path / file).write_text(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        Tokenizer.load(path)
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_in_another_form_says_how_to_make_tokenizer_json(folder: Folder, name: str) -> None:
    path = folder(settings={"tokenizer_class": "LlamaTokenizer"})
    (path / "tokenizer.json").unlink()
    (path / name).write_bytes(b"anything")
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.load(path)
    assert f"{path} holds {name} but no tokenizer.json" in caught.value.message
    assert f"AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", sorted(RESERVED_OPTIONS))
def test_reserved_names_are_refused_as_template_options(folder: Folder, chatml: str, name: str) -> None:
    tokenizer = Tokenizer.load(folder(settings={"chat_template": chatml}))
    with pytest.raises(InvalidRequestError, match=f"^{name} cannot be set") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "a"}], **{name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_loading_imports_neither_torch_nor_modelling_code(folder: Folder, chatml: str) -> None:
    path = folder(
        settings={"chat_template": chatml, "tokenizer_class": "LlamaTokenizer"}, config={"model_type": "llama"}
    )
    code = (
        "import sys; from pathlib import Path; from aserve.text.tokenizer import Tokenizer;"
        f"Tokenizer.load(Path({str(path)!r})).encode_chat([{{'role': 'user', 'content': 'a'}}]);"
        "print([m for m in sys.modules if m == 'torch' or 'modeling_' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
