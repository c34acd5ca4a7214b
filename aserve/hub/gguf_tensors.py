"""Which GGUF tensor becomes which Hugging Face weight, and how its values change on the way.

Called by ``gguf_convert``. Values are produced chunk by chunk as bfloat16 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from aserve.core.errors import ModelLoadError
from aserve.hub.gguf_file import Array, GgufFile, GgufTensor

_TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER: Mapping[str, str] = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IGNORED = frozenset({"rope_freqs.weight"})  # is in config.json

Change = Literal["none", "unpermute", "minus_one"]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One weight to write: its Hugging Face name, its tensor, and the change of its values."""

    name: str
    tensor: GgufTensor
    change: Change
    num_heads: int = 1

    def chunks(self) -> Iterator[bytes]:
        """The weight's bfloat16 bytes in order, rounded to nearest even."""
        if self.change == "unpermute":
            yield _bfloat16(unpermute(self.tensor.values(), self.num_heads))
            return
        for values in self.tensor.chunks():
            yield _bfloat16(values - 1 if self.change == "minus_one" else values)


def weight_sources(file: GgufFile, config: dict[str, Any]) -> list[WeightSource]:
    """List the weights of a model, by name. Raises ModelLoadError for an unknown or a missing tensor."""
    layer_names = _GEMMA_LAYER if file.architecture == "gemma3" else _LAYER
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    sources: list[WeightSource] = []
    for name, tensor in file.tensors.items():
        if name in _IGNORED:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        part = match.group(2) if match else ""
        target = (_TOP if match and match.group(1) is None else layer_names).get(part)
        if match is None or target is None:
            raise ModelLoadError(f"{file.path}: tensor {name} is not known in a {file.architecture} model")
        change: Change = "none"
        if file.architecture == "llama" and part in heads:
            change = "unpermute"
        elif file.architecture == "gemma3" and part.endswith("norm"):
            change = "minus_one"  # llama.cpp stores 1 + weight
        prefix = "" if match.group(1) is None else f"model.layers.{match.group(1)}."
        sources.append(WeightSource(f"{prefix}{target}.{match.group(3)}", tensor, change, heads.get(part, 1)))
    _check_complete(file, config["num_hidden_layers"], layer_names)
    return sorted(sources, key=lambda source: source.name)


def unpermute(values: Array, num_heads: int) -> Array:
    """Undo llama.cpp's order of query and key rows, which pairs channel i of a head with i + half for its rope."""
    rows = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, -1)
    return cast("Array", rows.swapaxes(1, 2).reshape(values.shape))


def _check_complete(file: GgufFile, num_layers: int, layer_names: Mapping[str, str]) -> None:
    optional = {"attn_q_norm", "attn_k_norm"} if file.architecture in ("llama", "qwen2") else set[str]()
    wanted = ["token_embd.weight", "output_norm.weight"]
    wanted += [f"blk.{n}.{part}.weight" for n in range(num_layers) for part in layer_names if part not in optional]
    missing = [name for name in wanted if name not in file.tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{file.path}: tensor {missing[0]}{more} missing")


def _bfloat16(values: Array) -> bytes:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return cast("Array", quantize(values, GGMLQuantizationType.BF16)).tobytes()
