"""What a user can call a model, and the one line for what is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aserve.core.errors import ModelLoadError
from aserve.hub import BUILTIN_MODELS, builtin_architecture, resolve


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    def refused(model: str, **options: Any) -> str:
        with pytest.raises(ModelLoadError) as caught:
            resolve(model, cache_dir=tmp_path / "cache", **options)
        assert model in caught.value.message
        assert "\n" not in caught.value.message
        return caught.value.message

    return refused


def test_a_hugging_face_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("")
    assert resolve(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_folders_that_are_no_model(tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    assert "is empty" in refused(str(folder))
    (folder / "notes.txt").write_text("")
    assert "has no config.json" in refused(str(folder))
    (folder / "b.gguf").write_text("")
    assert str(folder / "b.gguf") in refused(str(folder))


@pytest.mark.parametrize(
    "model",
    [
        "./nowhere",
        "/no/where",
        "~/no-such-folder",
        "a/b/c",
        "x.gguf",
        "some/x.gguf",
        "x" * 5000 + "/",
        "two words",
        "nul\0",
    ],
)
def test_paths_that_do_not_exist(refused: Callable[..., str], model: str) -> None:
    assert "no file or folder" in refused(model)


def test_a_file_that_is_no_model(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert "is no GGUF file" in refused(str(tmp_path / "notes.txt"))
    (tmp_path / "empty.gguf").write_text("")
    assert "is no GGUF file" in refused(str(tmp_path / "empty.gguf"))


@pytest.mark.parametrize("model", ["someone/some-model", "some-model"])
def test_hub_ids_without_a_network(refused: Callable[..., str], model: str) -> None:
    assert "switched off" in refused(model, offline=True)
    assert "switched off" in refused(model, offline=True, revision="main")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "accept its licence"),
        ("RepositoryNotFoundError", "no model someone/x on the hub"),
        ("RevisionNotFoundError", "has no revision v9"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("odd\nid"), "odd id"),
    ],
)
def test_what_the_hub_may_answer(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], error: Any, message: str
) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    def fail(*args: Any, **options: Any) -> None:
        if isinstance(error, str):
            kind = getattr(errors, error)
            request = httpx.Request("GET", "https://huggingface.co")
            if issubclass(kind, errors.HfHubHTTPError):
                raise kind("no", response=httpx.Response(404, request=request))
            raise kind("no")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert message in refused("someone/x", revision="v9")


def test_a_hub_model_in_another_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: Callable[..., str]
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    assert "has no config.json" in refused("someone/x")
    (tmp_path / "config.json").write_text("{}")
    assert resolve("someone/x", cache_dir=tmp_path / "cache") == tmp_path


def test_a_gguf_file_is_converted_once(tiny_gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    seen: list[int] = []
    folder = resolve(str(tiny_gguf), cache_dir=cache, progress=lambda done, total: seen.append(done))
    assert (folder / "model.safetensors").is_file()
    assert seen
    seen.clear()
    assert resolve(str(tiny_gguf), cache_dir=cache, progress=lambda done, total: seen.append(done)) == folder
    assert not seen
    os.utime(tiny_gguf, ns=(1, 1))
    assert resolve(str(tiny_gguf), cache_dir=cache) != folder
    assert not any((cache / "work").iterdir())


def test_a_revision_belongs_to_hub_ids(tiny_gguf: Path, refused: Callable[..., str]) -> None:
    for model in (str(tiny_gguf), str(tiny_gguf.parent), *BUILTIN_MODELS):
        assert "--revision" in refused(model, revision="main")


def test_only_one_copy_of_the_weights_is_taken_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    needed = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]
    copies = [
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "original/consolidated.00.pth",
        "original/params.json",
        "onnx/model.safetensors",
        "onnx/config.json",
        "pytorch_model.bin",
        "tokenizer.model",
        "README.md",
    ]
    taken: list[str] = []

    def download(model: str, *, allow_patterns: Any, ignore_patterns: Any, **options: Any) -> str:
        taken[:] = filter_repo_objects(
            needed + copies, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns, key=str
        )
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("someone/x", cache_dir=tmp_path / "cache")
    assert taken == needed


def test_the_architecture_of_built_in_models_is_known_before_they_are_there() -> None:
    assert builtin_architecture("smollm2-135m") == "LlamaForCausalLM"
    assert builtin_architecture("gemma3-270m") == "Gemma3ForCausalLM"
    assert builtin_architecture("someone/x") is None


def test_a_folder_with_only_an_adapter_is_explained(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"holds an adapter \(LoRA\) and not the model"):
        resolve(str(tmp_path), cache_dir=tmp_path / "cache")
