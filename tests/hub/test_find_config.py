"""Finding a model's config.json without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aserve.core.errors import ModelLoadError
from aserve.core.model_spec import ModelSpec
from aserve.hub import BUILTIN_MODELS, find_config, resolve


def test_of_a_gguf_file_nothing_is_converted(tiny_gguf: Path, tmp_path: Path) -> None:
    found = find_config(str(tiny_gguf))
    folder = resolve(str(tiny_gguf), cache_dir=tmp_path / "cache")
    assert found == json.loads((folder / "config.json").read_text())


def test_of_a_hub_model_the_config_alone_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[dict[str, Any]] = []
    (tmp_path / "config.json").write_text('{"a": 1}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **kw: asked.append(kw) or str(tmp_path))
    assert find_config("someone/x", revision="v9") == {"a": 1}
    assert asked[0]["allow_patterns"] == ["config.json"]
    assert asked[0]["revision"] == "v9"


@pytest.mark.parametrize("name", list(BUILTIN_MODELS))
def test_builtin_models_have_their_sizes_at_hand(name: str) -> None:
    assert ModelSpec.from_hf(find_config(name, offline=True)).architecture == BUILTIN_MODELS[name].architecture


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not valid JSON"), ("[1]", "is not a JSON object"), ("\udcff", "is not valid JSON")],
)
def test_damaged_configs(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, errors="surrogateescape")
    for model in (path, tmp_path):
        with pytest.raises(ModelLoadError, match=message) as caught:
            find_config(str(model))
        assert str(path) in caught.value.message


def test_what_is_no_model(tmp_path: Path, tiny_gguf: Path) -> None:
    (tmp_path / "empty").mkdir()
    for model, message in {
        str(tmp_path / "empty"): "has no config.json",
        str(tmp_path / "x.json"): "there is no file or folder",
        "x.gguf": "there is no file or folder",
        "two words": "there is no file or folder",
        "x" * 5000 + "/": "there is no file or folder",
        "nul\0": "there is no file or folder",
    }.items():
        with pytest.raises(ModelLoadError, match=message):
            find_config(model)
    with pytest.raises(ModelLoadError, match="--revision goes with a hub id"):
        find_config(str(tiny_gguf), revision="main")
    with pytest.raises(ModelLoadError, match="switched off"):
        find_config("someone/x", offline=True)
