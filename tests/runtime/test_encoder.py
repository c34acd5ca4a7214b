"""Encoders against transformers: vectors and scores of whole engines, over tiny random BERTs with WordPiece."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

from aserve.assembly import open_engine
from aserve.core.config import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from aserve.core.encoder_spec import EncoderSpec
from aserve.core.errors import ContextLengthError, InvalidRequestError, ModelLoadError, TaskNotOfferedError
from aserve.runtime.encoder_runner import padded_groups
from aserve.server.app import App
from aserve.server.engine_slot import EngineSlot
from tests.server.conftest import Client

pytestmark = pytest.mark.anyio

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "layer_norm_eps": 1e-12,
}
TEXTS = ["a", "hello world", "to be or not to be " * 2, "x", "abc def ghi jkl mno", "aserve", ""]


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a random checkpoint with a tokenizer of single letters."""

    def make(kind: type = transformers.BertModel, files: dict[str, Any] | None = None, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("encoders") / "bert"
        torch.manual_seed(5)
        model = kind(transformers.BertConfig(**{**SIZES, **settings}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                low, high = (0.5, 1.5) if name.endswith("LayerNorm.weight") else (-0.3, 0.3)
                parameter.uniform_(low, high)
        model.save_pretrained(folder)
        _write_tokenizer(folder)
        for name, value in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(value))
        return folder

    return make


def _write_tokenizer(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [chr(97 + i) for i in range(26)]
    vocab = {token: i for i, token in enumerate([*special, *letters, *("##" + letter for letter in letters)])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.enable_truncation(7)  # as published ones have it, and what must not count
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]",
                    "pad_token": "[PAD]", "unk_token": "[UNK]"})
    )  # fmt: skip


def encoded(folder: Path, *texts: str, max_length: int = 40) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")
    columns = [[text] for text in texts]  # by themselves, an empty second text would be none
    return tokenizer(*columns, return_tensors="pt", truncation=True, max_length=max_length, return_token_type_ids=True)


def states_of(folder: Path, text: str, **options: Any) -> np.ndarray:
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(**encoded(folder, text, **options)).last_hidden_state[0].numpy()


def normal(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def config(folder: Path, *, device: Any = "cpu", **scheduler: Any) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=str(folder), device=device), scheduler=SchedulerConfig(**scheduler))


@pytest.mark.parametrize("settings", [{}, {"hidden_act": "gelu_new"}, {"hidden_act": "relu", "type_vocab_size": 1}])
async def test_vectors_are_the_means_of_transformers(write, settings) -> None:
    """Many inputs in one step, padded together, and one by one."""
    folder = write(**settings)
    expected = np.stack([normal(states_of(folder, text).mean(0)) for text in TEXTS])
    for scheduler in ({}, {"max_num_seqs": 2, "max_in_flight": 2}, {"max_batch_tokens": 40}):
        async with open_engine(config(folder, **scheduler)) as engine:
            np.testing.assert_allclose(await engine.embed(TEXTS), expected, atol=2e-6)
            raw = (await engine.embed(TEXTS[1], normalize=False))[0]
            np.testing.assert_allclose(raw, states_of(folder, TEXTS[1]).mean(0), atol=2e-6)
            assert engine.stats().num_prefix_hits == 0


@pytest.mark.gpu
async def test_a_gpu_makes_the_same_vectors(write) -> None:
    folder = write()
    expected = np.stack([normal(states_of(folder, text).mean(0)) for text in TEXTS])
    async with open_engine(config(folder, device="cuda")) as engine:
        np.testing.assert_allclose(await engine.embed(TEXTS), expected, atol=2e-3)


async def test_the_first_token_as_sentence_transformers_has_it(write) -> None:
    modules = [{"idx": n, "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
               for n, kind in enumerate(("Transformer", "Pooling"))]  # fmt: skip
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        "sentence_bert_config.json": {"max_seq_length": 20, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": "find "}},
    }
    folder = write(files=files)
    async with open_engine(config(folder)) as engine:
        assert engine.capacity.max_length == 20
        (vector,) = await engine.embed("abc", prompt_name="query")
        np.testing.assert_allclose(vector, states_of(folder, "find abc")[0], atol=2e-6)
        long = "a " * 30
        with pytest.raises(ContextLengthError, match="20 tokens, and this one has 32"):
            await engine.embed(long)
        (vector,) = await engine.embed(long, truncate=12)
        np.testing.assert_allclose(vector, states_of(folder, long, max_length=12)[0], atol=2e-6)
        with pytest.raises(InvalidRequestError, match="leaves no room beside special tokens"):
            await engine.embed(long, truncate=2)
        with pytest.raises(TaskNotOfferedError):
            await engine.complete("abc", max_tokens=2).collect()


async def test_names_of_other_checkpoints(write, tmp_path) -> None:
    """With a prefix and other heads, and under the first names of the norms."""
    plain = write()
    weights = load_file(plain / "model.safetensors")
    old = {f"bert.{n.replace('LayerNorm.weight', 'LayerNorm.gamma').replace('LayerNorm.bias', 'LayerNorm.beta')}": t
           for n, t in weights.items()}  # fmt: skip
    folder = tmp_path / "old"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((plain / name).read_bytes())
    settings = json.loads((plain / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({**old, "cls.predictions.bias": torch.zeros(3)}, folder / "model.safetensors")
    async with open_engine(config(plain)) as one, open_engine(config(folder)) as other:
        np.testing.assert_array_equal(await one.embed(TEXTS), await other.embed(TEXTS))


@pytest.mark.parametrize("function", [None, "torch.nn.modules.linear.Identity"])
async def test_a_cross_encoder_scores_pairs(write, function) -> None:
    folder = write(transformers.BertForSequenceClassification, num_labels=1)
    if function is not None:
        settings = json.loads((folder / "config.json").read_text())
        own = {"sentence_transformers": {"activation_fn": function}}
        (folder / "config.json").write_text(json.dumps(settings | own))
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    documents = ["hello", "to be or not", "aserve " * 30, ""]

    def score_of(document: str, max_length: int = 40) -> float:
        with torch.no_grad():
            logit = model(**encoded(folder, "what is it", document, max_length=max_length)).logits[0, 0]
        return float(logit.sigmoid() if function is None else logit)

    async with open_engine(config(folder)) as engine:
        client = Client(App(EngineSlot(engine), ServerConfig()))
        name = engine.model_names[0]
        body = {"model": name, "query": "what is it", "documents": documents, "truncate_prompt_tokens": -1}
        answer = await client.post("/v1/rerank", body)
        assert answer.status == 200, answer.body
        expected = [score_of(document) for document in documents]
        for entry in answer.json["results"]:
            assert entry["relevance_score"] == pytest.approx(expected[entry["index"]], abs=2e-6)
        assert [e["index"] for e in answer.json["results"]] == sorted(range(4), key=lambda i: -expected[i])
        body = {"model": name, "text_1": "what is it", "text_2": documents[:2]}
        scores = (await client.post("/v1/score", body)).json["data"]
        assert [entry["score"] for entry in scores] == pytest.approx(expected[:2], abs=2e-6)
        refused = await client.post("/v1/rerank", {"model": name, "query": "a", "documents": documents})
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        refused = await client.post("/v1/embeddings", {"model": name, "input": "a"})
        assert (refused.status, refused.error["code"]) == (400, "task_not_offered")
        assert "/v1/rerank" in refused.error["message"]


def test_which_text_a_token_belongs_to_matters_in_these_tests(write) -> None:
    folder = write(transformers.BertForSequenceClassification, num_labels=1)
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    pair = encoded(folder, "what is it", "hello")
    with torch.no_grad():
        right = float(model(**pair).logits[0, 0])
        wrong = float(model(**{**pair, "token_type_ids": torch.zeros_like(pair["input_ids"])}).logits[0, 0])
    assert abs(right - wrong) > 1e-3


def test_inputs_are_padded_with_others_of_their_length() -> None:
    lengths = np.array([3, 200, 16, 17, 40, 1, 33])
    begins = np.cumsum(lengths) - lengths
    groups = padded_groups(begins, lengths)
    assert sorted(tokens.shape[1] for tokens, *_ in groups) == [16, 17, 40, 200]
    places = np.concatenate([places for *_, places in groups])
    assert sorted(places.tolist()) == list(range(lengths.sum()))
    for tokens, mask, kept, places in groups:
        np.testing.assert_array_equal(tokens.reshape(-1)[kept], places)
        assert mask.sum() == len(kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "num_attention_heads 5"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "Tanh"),
    ],
)
def test_what_is_not_computed_is_refused(change, message) -> None:
    with pytest.raises(ModelLoadError, match=message):
        EncoderSpec.from_hf({"architectures": ["BertModel"], **SIZES, **change})
