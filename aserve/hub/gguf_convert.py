"""Converts a GGUF file to a Hugging Face folder: weights in bfloat16, tokenizer, configuration.

Done once per file, by ``resolve`` and ``pull``. Needs numpy, ``gguf`` and ``tokenizers``, never torch; expands a few
rows at a time, so memory stays far below the model's size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aserve.hub.gguf_config import check_architecture, generation_config, model_config
from aserve.hub.gguf_file import GgufFile
from aserve.hub.gguf_tensors import weight_sources
from aserve.hub.gguf_tokenizer import build_tokenizer
from aserve.hub.safetensors_writer import Weight, write_safetensors


def convert_gguf(path: Path, folder: Path, *, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the model of a GGUF file into an existing folder.

    Args:
        progress: called with (bytes of the file's tensors done, all).

    Raises:
        ModelLoadError: the file is damaged, or holds something that cannot be converted.
        OSError: the folder cannot be written, or the disk is full.
    """
    file = GgufFile(path)
    check_architecture(file)
    config = model_config(file)
    sources = weight_sources(file, config)
    tokenizer, tokenizer_config = build_tokenizer(file)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(file))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    sizes = {source.name: source.tensor.num_bytes for source in sources}
    total, done = sum(sizes.values()), 0

    def written(weight: Weight) -> None:
        nonlocal done
        done += sizes[weight.name]
        if progress is not None:
            progress(done, total)

    weights = [Weight(source.name, source.tensor.shape, source.chunks) for source in sources]
    write_safetensors(folder / "model.safetensors", weights, written=written)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
