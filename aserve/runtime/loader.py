"""Reads a model folder: ``config.json`` and safetensors files in, a ready ``Model`` out.

Everything that can be wrong with a checkpoint is found from the files' headers, before any memory is taken, and is a
``ModelLoadError`` of one line that names the culprit. Then the tensors are streamed from memory maps, file by file:
each parameter is written exactly once, and each layer brings its weight into its final form as soon as it is complete,
so the peak is the model plus one layer. Called by the executor, on its thread. Knows nothing of the KV cache.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aserve.core.encoder_spec import EncoderSpec
from aserve.core.errors import ModelLoadError
from aserve.core.model_spec import ModelSpec
from aserve.distributed.group import SoloGroup, TPGroup
from aserve.layers.context import LayerContext
from aserve.layers.weights import WeightTarget
from aserve.models.bert import Bert
from aserve.models.model import Model
from aserve.models.registry import model_class
from aserve.quantization.registry import load_scheme
from aserve_kernels.kernel_set import KernelSet

_log = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
Progress = Callable[[int, int], None]
"""Told after each tensor how many bytes of how many were read; the last call has both equal."""

_STORED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Entry(NamedTuple):
    """One tensor of a checkpoint, as its file's header describes it; ``name`` is the one in the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_model(
    folder: Path,
    *,
    spec: ModelSpec | None = None,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    progress: Progress | None = None,
    max_model_len: int | None = None,
    group: TPGroup | None = None,
) -> Model:
    """Return the model of a Hugging Face folder, its weights on ``device``, converted to ``dtype``.

    ``spec`` is what ``read_spec`` returned for the folder, if it was asked. ``max_model_len`` is the longest sequence
    that will be computed, if shorter than the model's context. Raises ModelLoadError.
    """
    spec = spec or ModelSpec.from_folder(folder)
    scheme = load_scheme(spec.quant_method)
    factory = model_class(spec.architecture)
    spec, entries = _complete(spec, _rename(_read_headers(folder), factory.PREFIXES))
    spec, entries = _settle_tied_head(spec, entries)
    ctx = LayerContext(
        kernels=kernels,
        group=group or SoloGroup(),
        quant=scheme,
        dtype=dtype,
        device=device,
    )
    model = factory(spec, ctx, min(spec.max_positions, max_model_len or spec.max_positions))
    targets = model.weight_targets()
    _check(targets, entries, model.IGNORED)
    _copy_weights(targets, entries, progress)
    return model


def load_encoder(
    folder: Path,
    *,
    spec: EncoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    progress: Progress | None = None,
) -> Bert:
    """Return the encoder of a Hugging Face folder, as ``load_model`` does a decoder. Raises ModelLoadError."""
    entries = _rename(_read_headers(folder), Bert.PREFIXES)
    entries = {_modern(name): entry for name, entry in entries.items()}
    ctx = LayerContext(kernels=kernels, group=SoloGroup(), quant=load_scheme(None), dtype=dtype, device=device)
    model = Bert(spec, ctx)
    targets = model.weight_targets()
    _check(targets, entries, model.ignored)
    _copy_weights(targets, entries, progress)
    return model


def _modern(name: str) -> str:
    """BERT's first checkpoints call a norm's weight and bias gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def stored_dtype(folder: Path) -> str | None:
    """The name of the dtype that most of a folder's weights are stored in. Raises ModelLoadError."""
    dtypes = Counter(entry.dtype for entry in _read_headers(folder).values())
    return _STORED_DTYPES.get(max(dtypes, key=dtypes.__getitem__, default=""))


def read_spec(folder: Path) -> ModelSpec:
    """Return the spec of a model folder; a dtype that the config does not name is that of the stored weights.

    Raises ModelLoadError.
    """
    spec = ModelSpec.from_folder(folder)
    if spec.dtype is not None:
        return spec
    return replace(spec, dtype=stored_dtype(folder))


def _read_headers(folder: Path) -> dict[str, _Entry]:
    """Return every tensor of the folder's safetensors files, in the order in which the files hold them."""
    if (folder / SINGLE_FILE).is_file():
        return _read_header(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise ModelLoadError(_no_weights_message(folder))
    weight_map = _read_index(folder / INDEX_FILE)
    entries: dict[str, _Entry] = {}
    for name in sorted(set(weight_map.values())):
        for tensor_name, entry in _read_header(folder / name).items():
            if tensor_name in entries:
                other = entries[tensor_name].file.name
                raise ModelLoadError(f"tensor {tensor_name} is stored twice, in {other} and in {name}")
            entries[tensor_name] = entry
    for tensor_name, name in weight_map.items():
        if tensor_name not in entries or entries[tensor_name].file.name != name:
            raise ModelLoadError(f"{name} does not hold tensor {tensor_name}, although {INDEX_FILE} says so")
    return entries


def _no_weights_message(folder: Path) -> str:
    message = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if others:
        return f"{message}, only {others[0]}; pickled weights are not read, convert the model to safetensors"
    return message


def _read_index(path: Path) -> dict[str, str]:
    try:
        index: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {_one_line(error)}") from None
    weight_map: object = cast("dict[str, object]", index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path.name}: weight_map is missing or empty, so it names no weights")
    for name in cast("dict[str, object]", weight_map).values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(f"{path.name}: weight_map names {name!r}, which is not a file of the same folder")
    return cast("dict[str, str]", weight_map)


def _read_header(path: Path) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                entries[name] = _Entry(name, path, tuple(part.get_shape()), str(part.get_dtype()))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path.name} is damaged or not completely downloaded: {_one_line(error)}") from None
    return entries


def _rename(entries: dict[str, _Entry], prefixes: Mapping[str, str]) -> dict[str, _Entry]:
    """Return the tensors under the names of the model's table. Raises ModelLoadError if two come to have one name."""
    if not prefixes:
        return entries
    renamed: dict[str, _Entry] = {}
    for stored, entry in entries.items():
        prefix = next((prefix for prefix in prefixes if stored.startswith(prefix)), "")
        name = prefixes.get(prefix, "") + stored.removeprefix(prefix)
        if name in renamed:
            raise ModelLoadError(f"tensors {renamed[name].name} and {stored} stand for the same weight")
        renamed[name] = entry
    return renamed


def _complete(spec: ModelSpec, entries: dict[str, _Entry]) -> tuple[ModelSpec, dict[str, _Entry]]:
    """What was saved without a head, as models for vectors are, under the names that it has in a whole model."""
    if "embed_tokens.weight" not in entries:
        return spec, entries
    return replace(spec, tie_word_embeddings=True), {f"model.{name}": entry for name, entry in entries.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _settle_tied_head(spec: ModelSpec, entries: dict[str, _Entry]) -> tuple[ModelSpec, dict[str, _Entry]]:
    """Decide what a stored head means for a model whose config ties it, as transformers 5 does.

    Equal to the embedding: left out. Different: the config is wrong, the head counts. No embedding: the head is both.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not spec.tie_word_embeddings or head not in entries:
        return spec, entries
    if embedding not in entries:
        return spec, {embedding if name == head else name: entry for name, entry in entries.items()}
    if not _equal(entries[head], entries[embedding]):
        _log.warning("config.json ties lm_head to the embedding, but the checkpoint stores a different one: using it")
        return replace(spec, tie_word_embeddings=False), entries
    return spec, {name: entry for name, entry in entries.items() if name != head}


def _equal(a: _Entry, b: _Entry) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    with safe_open(a.file, framework="pt") as first, safe_open(b.file, framework="pt") as second:
        return torch.equal(first.get_tensor(a.name), second.get_tensor(b.name))


def _check(targets: Mapping[str, WeightTarget], entries: Mapping[str, _Entry], ignored: tuple[str, ...]) -> None:
    """Raise ModelLoadError unless the checkpoint holds exactly what the model takes (and what it ignores)."""
    missing = [name for name in targets if name not in entries]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks tensor {missing[0]}{_and_more(missing)}")
    unknown = [n for n in entries if n not in targets and not any(fnmatchcase(n, pattern) for pattern in ignored)]
    if unknown:
        raise ModelLoadError(
            f"the checkpoint holds tensor {unknown[0]}{_and_more(unknown)}, which this architecture does not have"
        )
    for name, target in targets.items():
        entry = entries[name]
        if entry.shape != target.shape:
            raise ModelLoadError(
                f"tensor {name} in {entry.file.name} has shape {list(entry.shape)}, expected {list(target.shape)}"
            )
        if entry.dtype not in _STORED_DTYPES:
            raise ModelLoadError(f"tensor {name} in {entry.file.name} has type {entry.dtype}, which is not supported")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _copy_weights(
    targets: Mapping[str, WeightTarget], entries: Mapping[str, _Entry], progress: Progress | None
) -> None:
    """Stream every tensor into its layer, in file order; finish each layer when it has all of its tensors."""
    report = progress or _no_progress
    num_left = Counter(id(target.layer) for target in targets.values())
    total = sum(_num_bytes(entries[name]) for name in targets)
    done = 0
    with ExitStack() as stack:
        open_file: Any = None
        open_path: Path | None = None
        for name, entry in entries.items():
            target = targets.get(name)
            if target is None:
                continue
            if entry.file != open_path:
                stack.close()
                open_path, open_file = entry.file, stack.enter_context(safe_open(entry.file, framework="pt"))
            tensor: Tensor = open_file.get_tensor(entry.name)
            target.layer.load(target.shard, target.name, tensor)
            num_left[id(target.layer)] -= 1
            if not num_left[id(target.layer)]:
                target.layer.finish_loading()
            done += _num_bytes(entry)
            report(done, total)
    assert not any(num_left.values()), "a layer was left without a part of its weights"


def _no_progress(done: int, total: int) -> None:
    pass


def _num_bytes(entry: _Entry) -> int:
    return math.prod(entry.shape) * {"F64": 8, "F32": 4}.get(entry.dtype, 2)
