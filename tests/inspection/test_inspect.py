"""What is said of a folder: facts that are right, and each problem by its own sentence."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.cli.main import main
from aserve.core.errors import ModelLoadError
from aserve.inspection.checkpoint import broken_tensors, read_checkpoint
from aserve.inspection.report import inspect_folder
from aserve.testing import tiny_llama


@pytest.fixture
def folder(tmp_path):
    return tiny_llama(tmp_path / "model")


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def texts(report, severity):
    return [text for kind, text in report.problems if kind == severity]


def test_a_sound_model(folder):
    report = inspect_folder(folder, check_weights=True)
    assert report.can_be_served and texts(report, "error") == []
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert sum(report.sections["weights"]["types"].values()) == stored
    assert report.sections["model"]["architecture"] == "LlamaForCausalLM"
    assert report.sections["model"]["context"] == 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_are_counted(tmp_path, dtype, value):
    good = torch.randn(300, 7).to(dtype)
    bad = good.clone()
    bad[17, 3] = bad[200, 0] = value
    whole = torch.full((5,), -1, dtype=torch.int64)
    save_file({"good": good, "bad": bad, "whole": whole}, tmp_path / "model.safetensors")
    assert broken_tensors(read_checkpoint(tmp_path).tensors) == {"bad": 2}


def test_broken_weights_are_found_only_on_request(folder):
    def break_one(tensors):
        next(iter(tensors.values())).view(-1)[0] = float("nan")

    change_tensors(folder, break_one)
    assert inspect_folder(folder).can_be_served
    report = inspect_folder(folder, check_weights=True)
    assert not report.can_be_served
    assert "no numbers" in texts(report, "error")[0]


def drop_a_tensor(folder):
    change_tensors(folder, lambda tensors: tensors.pop(next(iter(tensors))))


def cut_the_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_the_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


ERRORS = [
    (lambda folder: change_config(folder, architectures=["NoSuchForCausalLM"]), "NoSuchForCausalLM"),
    (drop_a_tensor, "describes a model of"),
    (cut_the_weights, "not complete"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "damaged"),
    (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    (drop_the_tokenizer, "tokenizer"),
    (lambda folder: change_config(folder, quantization_config={"quant_method": "awq", "bits": 4}), "awq"),
]


@pytest.mark.parametrize(("damage", "what"), ERRORS)
def test_what_keeps_a_model_from_being_served(folder, damage, what):
    damage(folder)
    report = inspect_folder(folder)
    assert not report.can_be_served
    assert any(what in text for text in texts(report, "error")), report.problems


def test_code_of_its_own_is_told(folder):
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Own"})
    report = inspect_folder(folder)
    assert report.can_be_served
    assert any("auto_map" in text for text in texts(report, "warning"))


def test_types_that_contradict_each_other(folder):
    change_config(folder, torch_dtype="bfloat16", dtype="bfloat16")
    assert any("says bfloat16, the files hold float32" in text for text in texts(inspect_folder(folder), "warning"))


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        inspect_folder(tmp_path)


def test_weights_in_several_files(tmp_path, folder):
    whole = read_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    names = list(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    split = read_checkpoint(folder)
    assert {t.name: t.shape for t in split.tensors} == {t.name: t.shape for t in whole.tensors}
    assert len(split.files) == 2 and split.num_bytes == whole.num_bytes


class TestCommand:
    def test_for_people(self, folder, capsys):
        assert main(["inspect", str(folder)]) == 0
        out = capsys.readouterr().out
        assert "LlamaForCausalLM" in out and out.rstrip().endswith("can be served")

    def test_for_programs(self, folder, capsys):
        change_config(folder, architectures=["NoSuchForCausalLM"])
        assert main(["inspect", str(folder), "--json"]) == 1
        result = json.loads(capsys.readouterr().out)
        assert result["can_be_served"] is False
        assert result["problems"][0]["severity"] == "error"

    def test_what_fits_on_a_gpu(self, folder, capsys):
        assert main(["inspect", str(folder), "--gpu-memory", "24GiB"]) == 0
        assert "longest request" in capsys.readouterr().out
        assert main(["inspect", str(folder), "--gpu-memory", "24"]) == 2


def test_an_encoder(tmp_path):
    import transformers

    from aserve.testing import write_byte_tokenizer

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=300, **sizes))
    model.save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    report = inspect_folder(tmp_path, check_weights=True)
    assert report.sections["model"]["good for"] == "embed, score"
    assert report.sections["model"]["layers"] == 2
    assert report.can_be_served, report.problems
