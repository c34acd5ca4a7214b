"""What model folders say they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aserve.core.abilities import read_abilities
from aserve.core.errors import ModelLoadError
from aserve.core.pooling import Abilities, PoolingKind

MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
POOLING = "1_Pooling__config"
QWEN = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}
BERT = {"architectures": ["BertModel"], "hidden_size": 32}


@pytest.fixture
def write(tmp_path: Path):
    """A function that writes files of a model folder, given as JSON values by name (``/`` as ``__``)."""

    def make(config: dict[str, Any], **files: Any) -> Path:
        for name, value in {"config": config, **files}.items():
            path = tmp_path / f"{name.replace('__', '/')}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(value))
        return tmp_path

    return make


def pooling(**modes: Any) -> dict[str, Any]:
    return {"word_embedding_dimension": 64, "pooling_mode_max_tokens": False, **modes}


def test_a_plain_decoder_does_everything(write):
    folder = write(QWEN)
    assert read_abilities(folder) == (Abilities(size=64), None)


def test_an_embedding_model_of_a_decoder(write):
    folder = write(
        QWEN,
        modules=MODULES,
        **{POOLING: pooling(pooling_mode_lasttoken=True, include_prompt=True)},
        config_sentence_transformers={"prompts": {"query": "Instruct: x\nQuery:", "document": ""}},
    )
    abilities, max_length = read_abilities(folder)
    assert abilities == Abilities(
        tasks=("embed", "score"),
        kind=PoolingKind.LAST,
        size=64,
        prompts={"query": "Instruct: x\nQuery:", "document": ""},
    )
    assert max_length is None


def test_an_encoder_of_sentence_transformers(write):
    folder = write(
        BERT | {"matryoshka_dimensions": [8, 16]},
        modules=MODULES[:2],
        **{POOLING: pooling(pooling_mode_cls_token=True)},
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"p": "x"}, "default_prompt_name": "p"},
    )
    abilities, max_length = read_abilities(folder)
    assert (abilities.kind, abilities.normalize, max_length) == (PoolingKind.FIRST, False, 256)
    assert (abilities.matryoshka, abilities.matryoshka_sizes) == (True, (8, 16))
    assert (abilities.lowercase, abilities.default_prompt) == (True, "p")


def test_a_plain_encoder_has_the_normalised_mean(write):
    abilities, _ = read_abilities(write(BERT))
    assert (abilities.tasks, abilities.kind, abilities.normalize) == (("embed", "score"), PoolingKind.MEAN, True)


def test_a_cross_encoder_only_scores(write):
    folder = write(
        {"architectures": ["BertForSequenceClassification"], "hidden_size": 32, "id2label": {"0": "LABEL_0"}}
    )
    abilities, _ = read_abilities(folder)
    assert (abilities.tasks, abilities.is_cross_encoder) == (("score",), True)


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        ({"architectures": ["BertForSequenceClassification"]}, {}, "2 classes"),
        (BERT, {"modules": [*MODULES[:2], {"path": "2_Dense", "type": "x.Dense"}],
                POOLING: pooling(pooling_mode_mean_tokens=True)}, "a Dense module"),
        (BERT, {"modules": MODULES, POOLING: pooling(pooling_mode_weightedmean_tokens=True)}, "weightedmean"),
        (BERT, {"modules": MODULES, POOLING: pooling(pooling_mode_cls_token=True, pooling_mode_mean_tokens=True)},
         "cls_token and mean_tokens"),
        (BERT, {"modules": MODULES, POOLING: pooling(pooling_mode_mean_tokens=True, include_prompt=False)},
         "leaves prompts out"),
        (QWEN, {"modules": MODULES, POOLING: pooling(pooling_mode_cls_token=True)}, "for encoders"),
        (BERT, {"modules": MODULES[:1]}, "no Pooling module"),
        (BERT, {"modules": {"a": 1}}, "modules.json"),
        (BERT, {"config_sentence_transformers": {"prompts": ["x"]}}, "prompts must be"),
        (BERT, {"config_sentence_transformers": {"default_prompt_name": "x"}}, "default_prompt_name 'x'"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(write, config, files, message):
    with pytest.raises(ModelLoadError, match=message):
        read_abilities(write(config, **files))
