"""The bytes of each kind of tokenizer are those that its texts have, a space lost at the beginning included."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from grammar_walk import Walk
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from aserve.assembly import grammar_compiler
from aserve.core.errors import InvalidGrammarError
from aserve.core.grammar import Grammar, GrammarKind
from aserve.text.tokenizer import Tokenizer

CACHED = Path("~/.cache/aserve/models").expanduser()


def save(rust: RustTokenizer, folder: Path) -> Tokenizer:
    rust.add_special_tokens([AddedToken("</s>", normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>").save_pretrained(str(folder))
    return Tokenizer.load(folder)


def sentencepiece(strips: bool) -> RustTokenizer:
    pieces = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)], "▁", *"abhet", "th", "the", "▁the", "▁a"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    rust = RustTokenizer(
        models.BPE({p: n for n, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if strips else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return rust


def texts(tokenizer: Tokenizer, grammar: Grammar, count: int) -> set[str]:
    compiler = grammar_compiler(tokenizer, size=4)
    ends = tokenizer.stop_token_ids
    rng = np.random.default_rng(0)
    found: set[str] = set()
    for _ in range(count):
        walk = Walk(compiler, grammar, vocab_size=tokenizer.vocab_size, stop=ends)
        said = walk.run(rng, ends=ends, closing=b"")
        found.add(tokenizer.decode(said or [], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("strips", [False, True])
def test_sentencepiece_with_byte_fallback(strips, tmp_path):
    tokenizer = save(sentencepiece(strips), tmp_path)
    found = texts(tokenizer, Grammar(GrammarKind.REGEX, "(the|a|é|🙂)( the| a|b){1,3}"), 30)
    assert all(re.fullmatch("(the|a|é|🙂)( the| a|b){1,3}", text) for text in found)
    assert any("🙂" in text for text in found)


def test_a_space_that_would_be_lost_does_not_begin_a_text(tmp_path):
    tokenizer = save(sentencepiece(True), tmp_path)
    found = texts(tokenizer, Grammar(GrammarKind.REGEX, " ?the"), 10)
    assert found == {"the"}


def test_a_tokenizer_without_bytes_of_its_own_is_refused(tmp_path):
    rust = RustTokenizer(models.WordPiece({p: n for n, p in enumerate(["[UNK]", "a", "##b"])}, unk_token="[UNK]"))
    rust.decoder = decoders.WordPiece()
    compiler = grammar_compiler(save(rust, tmp_path), size=4)
    with pytest.raises(InvalidGrammarError, match="tokenizer does not allow"):
        compiler.compile(Grammar(GrammarKind.REGEX, "a"))


@pytest.mark.weights
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_tokenizers(name):
    folder = next(CACHED.glob(f"{name}-*"), None)
    if folder is None:
        pytest.skip(f"aserve pull {name}")
    pattern = r'\{"name": "[A-Za-zéü ]{1,12}", "n": [0-9]{1,3}\}'
    found = texts(Tokenizer.load(folder), Grammar(GrammarKind.REGEX, pattern), 20)
    assert all(re.fullmatch(pattern, text) for text in found)
    assert len(found) > 10
