"""Small tokenizers of each kind, built in memory and written as model folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from aserve.text.token_bytes import byte_alphabet
from aserve.text.tokenizer import Tokenizer as LoadedTokenizer

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _add_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(s, normalized=False) for s in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("é!", normalized=False)])
    return tokenizer


def byte_level() -> Tokenizer:
    """Byte-level BPE, with merges inside and across characters."""
    letter = {b: c for c, b in byte_alphabet().items()}
    vocab = {c: n for n, c in enumerate(sorted(letter.values()))}
    merges: list[tuple[str, str]] = []
    for left, right in [
        (b"t", b"h"),
        (b"th", b"e"),
        (b" ", b"the"),
        (b"\xc3", b"\xa9"),
        (b"\xf0", b"\x9f"),
        (b"\x98", b"\x80"),
        (b"a", b"\xe2"),
        (b"\x82", b"\xac"),
        (b"\n", b"\n"),
    ]:
        a, b = ("".join(letter[x] for x in part) for part in (left, right))
        merges.append((a, b))
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return _add_tokens(tokenizer)


def sentencepiece(*, strip: bool = True, legacy: bool = False) -> Tokenizer:
    """BPE over text with byte fallback, as Llama 2 (strip) and Gemma (no strip) have it."""
    pieces = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)], "▁", *"abcdehilnorstw.,!é", "th", "the", "▁the", "▁a"]
    vocab = {p: n for n, p in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if strip else "never", split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _add_tokens(tokenizer)


def metaspace() -> Tokenizer:
    """Unigram with a Metaspace decoder (as T5), which looks at the first token."""
    pieces = ["<unk>", "▁", *"abcdehilnorst", "▁the", "▁a", "ing", "🙂"]
    tokenizer = Tokenizer(models.Unigram([(p, -float(n)) for n, p in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _add_tokens(tokenizer)


def word_piece() -> Tokenizer:
    """WordPiece, whose decoder puts spaces between tokens."""
    pieces = ["[UNK]", *"abcdehilnorst.,!", *[f"##{c}" for c in "abcdehilnorst"], "the", "##ing"]
    tokenizer = Tokenizer(models.WordPiece({p: n for n, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _add_tokens(tokenizer)


KINDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma": lambda: sentencepiece(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_folder(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write a folder without weights; ``settings`` None leaves tokenizer_config.json out."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        write_json(folder / "tokenizer_config.json", base | settings)
    if config is not None:
        write_json(folder / "config.json", config)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    return folder


@pytest.fixture(scope="session")
def kinds() -> dict[str, Tokenizer]:
    """One raw tokenizer of each kind."""
    return {name: build() for name, build in KINDS.items()}


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedTokenizer]:
    """The same tokenizers, loaded from folders by aserve."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: LoadedTokenizer.load(write_folder(root / name, build())) for name, build in KINDS.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tokenizer folder: ``folder(kind, **parts)``."""
    return lambda kind="byte_level", **parts: write_folder(tmp_path / "model", KINDS[kind](), **parts)


@pytest.fixture
def chatml() -> str:
    return CHATML
