"""Loading: what is accepted, what is refused with which words, and that every byte goes where it belongs."""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import aserve_kernels
from aserve.core.errors import ModelLoadError
from aserve.layers.batch import ForwardBatch
from aserve.models.model import Model
from aserve.runtime.loader import load_model, read_spec

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (24, 16)}
    for n in range(2):
        layer = f"model.layers.{n}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (16, 16),
            layer + "self_attn.k_proj.weight": (8, 16),
            layer + "self_attn.v_proj.weight": (8, 16),
            layer + "self_attn.o_proj.weight": (16, 16),
            layer + "mlp.gate_proj.weight": (20, 16),
            layer + "mlp.up_proj.weight": (20, 16),
            layer + "mlp.down_proj.weight": (16, 20),
            layer + "input_layernorm.weight": (16,),
            layer + "post_attention_layernorm.weight": (16,),
        }
    shapes |= {"model.norm.weight": (16,), "lm_head.weight": (24, 16)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, Tensor], *, shards: int = 1, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[n::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(folder: Path, **options: Any) -> Model:
    options = {"dtype": torch.float32, "device": CPU, "kernels": aserve_kernels.load("reference")} | options
    return load_model(folder, **options)


def logits(model: Model) -> Tensor:
    """Logits of a fixed prompt."""
    ids = torch.tensor([3, 1, 4, 1, 5])
    spec = model.spec
    shape = (2, 4, spec.num_kv_heads, spec.head_dim)
    batch = ForwardBatch(
        input_ids=ids,
        positions=torch.arange(5),
        slot_mapping=torch.arange(5)[None],
        cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([5], dtype=torch.int32),
        block_tables=torch.tensor([[[0, 1]]], dtype=torch.int32),
        max_query_len=5,
        max_seq_len=5,
        kv_caches=tuple(
            (torch.zeros(shape, dtype=model.ctx.dtype), torch.zeros(shape, dtype=model.ctx.dtype))
            for _ in range(spec.num_layers)
        ),
    )
    with torch.inference_mode():
        return model.compute_logits(model.forward(batch))


def test_shards_and_a_single_file_give_the_same_model(tmp_path: Path) -> None:
    one = load(write(tmp_path / "one", weights()))
    three = load(write(tmp_path / "three", weights(), shards=3))
    assert torch.equal(logits(one), logits(three))


def test_every_tensor_matters(tmp_path: Path) -> None:
    """Changing any one tensor changes the output, so none was left out, swapped or overwritten."""
    plain = logits(load(write(tmp_path, weights())))
    for name in weights():
        changed = weights()
        changed[name] = changed[name] * 1.5 + 0.1 * torch.randn_like(changed[name])
        assert not torch.allclose(plain, logits(load(write(tmp_path, changed)))), name


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_converted(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    rounded = {name: tensor.to(stored) for name, tensor in weights().items()}
    got = logits(load(write(tmp_path / "a", rounded), dtype=dtype))
    converted = {name: tensor.to(dtype) for name, tensor in rounded.items()}
    assert torch.equal(got, logits(load(write(tmp_path / "b", converted), dtype=dtype)))


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(write(tmp_path, weights(), shards=3), progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in weights().values())
    assert [t for _, t in seen] == [total] * len(weights())
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})
    assert seen[-1][0] == total


def test_angles_stored_by_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.randn(2)}
    got = logits(load(write(tmp_path / "a", weights() | extra)))
    assert torch.equal(got, logits(load(write(tmp_path / "b", weights()))))


# Tied heads


def tied_weights() -> dict[str, Tensor]:
    tensors = weights()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    return tensors


def test_a_tied_head_may_be_stored_once_under_either_name_or_twice(tmp_path: Path) -> None:
    untied = logits(load(write(tmp_path / "untied", tied_weights())))
    for left_out in (None, "lm_head.weight", "model.embed_tokens.weight"):
        tensors = tied_weights()
        tensors.pop(left_out or "", None)
        folder = write(tmp_path / f"without {left_out}", tensors, tie_word_embeddings=True)
        assert torch.equal(logits(load(folder)), untied), left_out


def test_a_head_that_differs_from_the_embedding_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = load(write(tmp_path / "a", weights(), tie_word_embeddings=True))
    assert "lm_head" in caplog.text
    assert torch.equal(logits(model), logits(load(write(tmp_path / "b", weights()))))
    assert not model.spec.tie_word_embeddings


def test_an_absent_setting_means_not_tied(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["lm_head.weight"]
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        load(write(tmp_path, tensors, tie_word_embeddings=None))


# Damage: (what is done to a folder of three shards) -> what the message must say


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_shard(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SECOND)
    change(tensors)
    save_file(tensors, folder / SECOND)


def lose_shard(folder: Path) -> str:
    (folder / SECOND).unlink()
    return SECOND


def cut_shard(folder: Path) -> str:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-100])
    return SECOND


def empty_shard(folder: Path) -> str:
    (folder / SECOND).write_bytes(b"")
    return SECOND


def lose_tensor(folder: Path) -> str:
    name = next(iter(load_file(folder / SECOND)))
    edit_shard(folder, lambda tensors: tensors.pop(name))
    edit_index(folder, lambda weight_map: weight_map.pop(name))
    return name


def misplace_tensor(folder: Path) -> str:
    name = next(iter(load_file(folder / SECOND)))
    edit_shard(folder, lambda tensors: tensors.pop(name))
    return name


def store_twice(folder: Path) -> str:
    edit_shard(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(16), "extra": torch.ones(1)}))
    other = folder / "model-00003-of-00003.safetensors"
    save_file(load_file(other) | {"model.norm.weight": torch.ones(16)}, other)
    return "model.norm.weight"


def add_tensor(folder: Path) -> str:
    edit_shard(folder, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(3)}))
    return "model.layers.2.mlp.up_proj.weight"


def add_bias(folder: Path) -> str:
    edit_shard(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}))
    return "model.layers.0.self_attn.q_proj.bias"


def transpose_tensor(folder: Path) -> str:
    data = (folder / SECOND).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    name = next(n for n, t in header.items() if n != "__metadata__" and t["shape"] != t["shape"][::-1])
    header[name]["shape"].reverse()
    raw = json.dumps(header).encode()
    (folder / SECOND).write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + size :])
    return name


def store_integers(folder: Path) -> str:
    name = next(iter(load_file(folder / SECOND)))
    edit_shard(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    return name


def empty_index(folder: Path) -> str:
    (folder / INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    return "weight_map"


def index_without_map(folder: Path) -> str:
    (folder / INDEX).write_text("[]")
    return "weight_map"


def cut_index(folder: Path) -> str:
    (folder / INDEX).write_text((folder / INDEX).read_text()[:40])
    return INDEX


def escape_folder(folder: Path) -> str:
    edit_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": "../secret.safetensors"}))
    return "../secret.safetensors"


def empty_config(folder: Path) -> str:
    (folder / "config.json").write_text("")
    return "config.json"


def lose_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


def lose_weights(folder: Path) -> str:
    for path in folder.glob("model*"):
        path.unlink()
    return "model.safetensors"


def pickled_weights(folder: Path) -> str:
    lose_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    return "pytorch_model.bin"


def quantized(folder: Path) -> str:
    changes = {"quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return "awq"


@pytest.mark.parametrize(
    "damage",
    [
        lose_shard, cut_shard, empty_shard, lose_tensor, misplace_tensor, store_twice, add_tensor, add_bias,
        transpose_tensor, store_integers, empty_index, index_without_map, cut_index, escape_folder, empty_config,
        lose_config, lose_weights, pickled_weights, quantized,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_damage_is_named_on_one_line(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    folder = write(tmp_path, weights(), shards=3)
    culprit = damage(folder)
    with pytest.raises(ModelLoadError, match=re.escape(culprit)) as caught:
        load(folder)
    assert "\n" not in caught.value.message


def test_a_truncated_single_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, weights())
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged"):
        load(tmp_path)


def test_nothing_is_loaded_from_a_damaged_folder(tmp_path: Path) -> None:
    """Everything is checked before the first tensor is read."""
    folder = write(tmp_path, weights(), shards=3)
    lose_tensor(folder)
    seen: list[int] = []
    with pytest.raises(ModelLoadError):
        load(folder, progress=lambda done, total: seen.append(done))
    assert seen == []


@pytest.mark.parametrize(("stored", "name"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")])
def test_a_dtype_the_config_does_not_name_is_that_of_the_weights(
    tmp_path: Path, stored: torch.dtype, name: str
) -> None:
    folder = write(tmp_path, {n: t.to(stored) for n, t in weights().items()}, dtype=None)
    assert read_spec(folder).dtype == name
