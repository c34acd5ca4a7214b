"""A configuration becomes an engine: names, errors, progress."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from aserve.assembly import open_engine
from aserve.core.config import CacheConfig, EngineConfig, ModelConfig
from aserve.core.errors import InvalidRequestError, ModelLoadError
from aserve.testing import tiny_llama

pytestmark = pytest.mark.anyio


def config_for(model: str, *names: str) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=model, served_model_name=names), cache=CacheConfig(kv_cache_tokens=512))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "Tiny2.5-0.1B-Instruct")


async def test_a_folder_is_served_under_its_whole_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[int, int, str]] = []

    def progress(done: int, total: int) -> None:
        loaded.append((done, total, threading.current_thread().name))

    async with open_engine(config_for(str(folder)), progress=progress) as engine:
        assert engine.model_names == ("Tiny2.5-0.1B-Instruct",)
        text = "".join([delta.text async for delta in engine.chat([{"role": "user", "content": "hi"}], max_tokens=4)])
        assert text
    assert loaded[-1][0] == loaded[-1][1] > 0
    assert {name for *_, name in loaded} == {"aserve-steps"}
    monkeypatch.chdir(folder)
    async with open_engine(config_for(".")) as engine:
        assert engine.model_names == ("Tiny2.5-0.1B-Instruct",)


async def test_given_names_are_used(folder: Path) -> None:
    async with open_engine(config_for(str(folder), "a", "b")) as engine:
        assert engine.model_names == ("a", "b")


async def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nothing-here"):
        async with open_engine(config_for(str(tmp_path / "nothing-here"))):
            pass


async def test_a_builtin_model_that_cannot_be_served_is_refused_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aserve.assembly.builtin_architecture", lambda _: "MambaForCausalLM")
    with pytest.raises(ModelLoadError, match="MambaForCausalLM is not supported; known: Llama"):
        async with open_engine(config_for("smollm2-135m"), cache_dir=tmp_path, offline=False):
            pass
    assert not list(tmp_path.iterdir())


async def test_reserved_template_options_are_a_mistake_of_the_caller(folder: Path) -> None:
    async with open_engine(config_for(str(folder))) as engine:
        with pytest.raises(InvalidRequestError, match="self"):
            await engine.encode_chat([{"role": "user", "content": "hi"}], self=1)
