"""What is to be said of a model: facts in sections, and problems, for people and for programs.

Gathers; decides only what is a problem. Called by ``aserve inspect``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from aserve.core.abilities import is_encoder, read_abilities
from aserve.core.encoder_spec import EncoderSpec
from aserve.core.errors import AserveError, InvalidRequestError, ModelLoadError
from aserve.core.model_spec import ModelSpec
from aserve.inspection.checkpoint import Checkpoint, broken_tensors, read_checkpoint
from aserve.planning.kv_elements import plain_elements
from aserve.planning.quantization import read_weight_format
from aserve.planning.weights import num_active_parameters, num_parameters
from aserve.text.tokenizer import Tokenizer

_NOT_A_PARAMETER = ("rotary_emb.inv_freq", "masked_bias", "position_ids", ".attn.bias")
_MANY = 5
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Value = str | int | float | list[Any] | dict[str, Any] | None


class Problem(NamedTuple):
    """``error``: the model cannot be served as it is. ``warning``: it can, but perhaps not as somebody expects."""

    severity: Literal["error", "warning"]
    text: str


@dataclass(slots=True)
class Report:
    """Sections of facts, and problems, in the order in which they are to be read."""

    sections: dict[str, dict[str, Value]] = field(default_factory=dict[str, dict[str, Value]])
    problems: list[Problem] = field(default_factory=list[Problem])
    spec: ModelSpec | None = None

    @property
    def can_be_served(self) -> bool:
        return not any(problem.severity == "error" for problem in self.problems)

    def error(self, text: str) -> None:
        self.problems.append(Problem("error", text))

    def warn(self, text: str) -> None:
        self.problems.append(Problem("warning", text))


def inspect_folder(
    folder: Path, *, check_weights: bool = False, progress: Callable[[int, int], None] = lambda done, total: None
) -> Report:
    """Look at a model folder. Raises ModelLoadError only if there is no ``config.json`` that can be read."""
    config = _read_config(folder)
    report = Report()
    checkpoint = _read_weights(report, folder)
    _describe_model(report, folder, config, checkpoint)
    if checkpoint is not None:
        _describe_weights(report, config, checkpoint)
        if check_weights:
            _check_values(report, checkpoint, progress)
    _describe_text(report, folder, answers="generate" in str(report.sections["model"].get("good for", "generate")))
    return report


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder}/config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{folder}/config.json is not a JSON object")
    return cast("dict[str, Any]", config)


def _read_weights(report: Report, folder: Path) -> Checkpoint | None:
    try:
        return read_checkpoint(folder)
    except ModelLoadError as error:
        report.error(error.message)
        return None


def _describe_model(report: Report, folder: Path, config: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
    facts = report.sections["model"] = {"architecture": _architecture(config)}
    if "auto_map" in config:
        report.warn("the model brings code of its own (auto_map), which is never run: what counts is its architecture")
    try:
        abilities = read_abilities(folder).abilities
        facts["good for"] = ", ".join(abilities.tasks)
        if is_encoder(folder):
            encoder = EncoderSpec.from_hf(config)
            facts |= {"parameters": encoder.num_weights, "context": encoder.max_positions, "layers": encoder.num_layers}
            return
        spec = report.spec = ModelSpec.from_hf(config)
    except ModelLoadError as error:
        report.error(error.message)
        return
    facts["parameters"] = num_parameters(spec)
    if spec.experts is not None:
        facts["active parameters"] = num_active_parameters(spec)
    facts["context"] = spec.max_positions
    facts["layers"] = spec.num_layers
    facts["heads"] = f"{spec.num_heads} of {spec.head_dim}, {spec.num_kv_heads} for keys and values"
    windows = [window for window in spec.sliding_windows if window is not None]
    if windows:
        facts["windows"] = f"{len(windows)} of {spec.num_layers} layers look back {max(windows)} tokens"
    dtype = spec.dtype if spec.dtype in ("bfloat16", "float16", "float32") else "bfloat16"
    facts["KV bytes per token"] = plain_elements(dtype).token_bytes(spec, 1)
    if checkpoint is not None and spec.quant_method is None:
        _compare_sizes(report, spec, checkpoint)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return ", ".join(map(str, cast("list[Any]", names)))
    return str(config.get("model_type", "not stated"))


def _compare_sizes(report: Report, spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """A head that is stored although it is tied to the embedding is the one thing that may be there twice."""
    stored = sum(t.num_values for t in checkpoint.tensors if not t.name.endswith(_NOT_A_PARAMETER))
    wanted = num_parameters(spec)
    head = spec.vocab_size * spec.hidden_size
    has_none = not spec.architecture.endswith("ForCausalLM")  # saved for its vectors alone
    if stored not in (wanted, wanted + head * spec.tie_word_embeddings, wanted - head * has_none):
        report.error(f"the files hold {stored:,} values, but config.json describes a model of {wanted:,}")


def _describe_weights(report: Report, config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    counts = checkpoint.values_by_dtype()
    facts = report.sections["weights"] = {
        "files": len(checkpoint.files),
        "bytes": checkpoint.num_bytes,
        "tensors": len(checkpoint.tensors),
        "types": dict(counts),
    }
    try:
        quantized = read_weight_format(config)
    except AserveError as error:
        report.error(error.message)
        return
    if quantized is not None:
        facts["quantisation"] = quantized.describe()
        report.error(f"weights quantised by {quantized.method} cannot be served yet; aserve plan can size them")
        return
    spec = report.spec
    stored = _DTYPES.get(next(iter(counts), ""))
    if spec is not None and stored is not None and spec.dtype not in (None, stored):
        report.warn(f"config.json says {spec.dtype}, the files hold {stored}")


def _check_values(report: Report, checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> None:
    broken = broken_tensors(checkpoint.tensors, progress)
    report.sections["weights"]["tensors with values that are no numbers"] = len(broken)
    if broken:
        shown = ", ".join(f"{name} ({number:,})" for name, number in list(broken.items())[:_MANY])
        more = f" and {len(broken) - _MANY} more" if len(broken) > _MANY else ""
        report.error(f"weights hold infinities or values that are no numbers: {shown}{more}")


def _describe_text(report: Report, folder: Path, *, answers: bool) -> None:
    facts = report.sections["text"] = {}
    try:
        tokenizer = Tokenizer.load(folder)
    except ModelLoadError as error:
        report.error(error.message)
        return
    facts["token ids"] = tokenizer.num_ids
    if not answers:
        return
    ends = tokenizer.stop_token_ids
    facts["end of text"] = [f"{i} {tokenizer.decode([i], skip_special_tokens=False)}" for i in ends]
    facts["sampling defaults"] = dict(tokenizer.generation_defaults)
    facts["chat template"] = ", ".join(_template_facts(tokenizer)) or "none"
    if not ends:
        report.warn("no token ends a text: answers go on to max_tokens")
    if tokenizer.chat_template is None:
        report.warn("there is no chat template: only /v1/completions works, unless --chat-template gives one")
    if not (folder / "generation_config.json").is_file():
        report.warn("there is no generation_config.json: ends of text and sampling defaults come from elsewhere")
    if report.spec is not None and tokenizer.num_ids > report.spec.vocab_size:
        extra = tokenizer.num_ids - report.spec.vocab_size
        report.warn(f"the tokenizer has {extra} ids that the model has no embedding for; they are refused")


def _template_facts(tokenizer: Tokenizer) -> Iterator[str]:
    template = tokenizer.chat_template
    if template is None:
        return
    user = {"role": "user", "content": "x"}
    for name, messages in (("user", [user]), ("system", [{"role": "system", "content": "y"}, user])):
        try:
            tokenizer.encode_chat(messages)
        except InvalidRequestError as error:
            yield f"refuses {name} messages ({error.message[:80]})"
        else:
            yield f"takes {name} messages"
    for what, sign in (("tools", "tools"), ("reasoning", "<think>")):
        if sign in template.text:
            yield f"knows {what}"
