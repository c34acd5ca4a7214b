"""A GGUF file's vocabulary as Hugging Face ``tokenizer.json`` and ``tokenizer_config.json``.

Two kinds: byte-level BPE ("gpt2"), whose splitting of text into words is known only by name, and sentencepiece BPE
("llama"), whose merges follow from its pieces. Called by ``gguf_convert``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from aserve.core.errors import ModelLoadError
from aserve.hub.gguf_file import GgufFile

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # token types of llama.cpp

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _TEKKEN,
}
"""How text is split before merging, by ``tokenizer.ggml.pre``: as in these models' own tokenizer.json. None is the
expression of GPT-2."""

_TAKES_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""A word that is a token is taken whole, whatever the merges say (``ignore_merges``)."""


def build_tokenizer(file: GgufFile) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer of a file and the ``tokenizer_config.json`` that goes with it.

    Raises:
        ModelLoadError: its kind is not known, or its parts do not fit together.
    """
    kind = file.text("tokenizer.ggml.model")
    tokens = [str(token) for token in file.items("tokenizer.ggml.tokens")]
    if not tokens:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.tokens is missing in its metadata")
    try:
        if kind == "gpt2":
            tokenizer: Any = _byte_level(file, tokens)
        elif kind == "llama":
            tokens = [_with_marks(token) for token in tokens]
            tokenizer = _sentencepiece(file, tokens)
        else:
            raise ModelLoadError(f"{file.path}: tokenizers of kind {kind!r} cannot be converted, only gpt2 and llama")
        kinds = file.items("tokenizer.ggml.token_type")
        for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [
                AddedToken(token, normalized=False, special=special)
                for token, kind in zip(tokens, kinds, strict=False)
                if kind == wanted
            ]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
        config = _config(file, tokens)
        tokenizer.post_processor = _ends(config, tokens)
    except ModelLoadError:
        raise
    except Exception as error:  # the tokenizers crate raises bare ones, for example for a merge of unknown tokens
        raise ModelLoadError(f"{file.path}: its vocabulary is damaged ({error})") from error
    return tokenizer, config


def _config(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    sentencepiece = file.text("tokenizer.ggml.model") == "llama"
    adds_bos = sentencepiece or file.text("tokenizer.ggml.pre", "") in ("llama-bpe", "llama3", "llama-v3")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.integer("{arch}.context_length"),
        "add_bos_token": file.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "add_eos_token": file.flag("tokenizer.ggml.add_eos_token", False),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.find(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    for name in ("bos", "eos"):
        config[f"add_{name}_token"] &= f"{name}_token" in config
    if template := file.find("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _ends(config: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """What is added before and after a text; transformers 5 reads it from here only, not from the configuration."""
    bos = [config["bos_token"]] if config["add_bos_token"] else []
    eos = [config["eos_token"]] if config["add_eos_token"] else []
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *[f"{t}:1" for t in bos], "$B:1", *[f"{t}:1" for t in eos]],
        special_tokens=[(token, tokens.index(token)) for token in {*bos, *eos}],
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    name = file.text("tokenizer.ggml.pre", "gpt-2")
    name = "gpt-2" if name == "default" else name
    if name not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise ModelLoadError(f"{file.path}: text splitting {name!r} is not known ({known}); use the original folder")
    merges = [_pair(str(merge)) for merge in file.items("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=name in _TAKES_WHOLE_WORDS)
    )
    split = _SPLITS[name]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        words = pre_tokenizers.Split(Regex(split), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    elif name == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    kinds = file.items("tokenizer.ggml.token_type") or [1] * len(tokens)
    # Gemma's scores do not follow its order of merging; the order of its pieces does.
    by_order = file.architecture.startswith("gemma")
    scores = range(0, -len(tokens), -1) if by_order else file.items("tokenizer.ggml.scores")
    unknown = file.integer("tokenizer.ggml.unknown_token_id", 0)
    pieces = {
        token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind not in (_CONTROL, _BYTE)
    }
    vocabulary = _vocabulary(tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(pieces, vocabulary),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    decoder: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        decoder.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge[1:].partition(" ")
    if not space:
        raise ValueError(f"merge {merge!r}")
    return merge[0] + left, right


def _merges(pieces: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best third first: the merges that sentencepiece makes."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, score in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-score, vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(found)]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Token to id; of equal ones the first counts."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _with_marks(token: str) -> str:
    """Some files spell pieces made of spaces as spaces."""
    return token.replace(" ", "▁") if token and not token.strip(" ") else token
