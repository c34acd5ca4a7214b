"""Control tokens that somebody wrote out in a message: they stay text, and only the template's own become tokens.

A tokenizer reads ``<|im_end|>`` as the token that ends a turn wherever it stands, so a user's text could end its turn
and begin one of the system. Here such texts, and the halves of one at the ends of a value, are hidden before the
template is rendered, and the prompt is encoded by a twin of the tokenizer that knows the control tokens under secret
names: the template's are renamed, the users' are not. Prompts without any take none of this way. Pure but for the
secrets; called by the tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, cast

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as RustTokenizer

from aserve.core.errors import InvalidRequestError

_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)  # noqa: RUF001 - DeepSeek writes it with a wide bar
_MOST_BEGINNINGS = 32
"""As many searches cost a long text less than one pass of the finder, which takes some 100 ns a character."""
_INDEX_DIGITS = 8
_SLICE = 1 << 14
"""The finder holds the GIL for some 5 ms for as many characters, and other threads have their turn between slices."""


def _secret() -> str:
    """Sixteen digits: they come through whatever a template does to a text (trim, case, JSON), and normalisers."""
    return str(10**15 + secrets.randbelow(9 * 10**15))


class ControlTokens:
    """The control tokens of one tokenizer: added tokens that are special, or written ``<|like this|>``.

    Others, such as ``<think>`` or ``<tool_call>``, are a part of what models write and templates look for in messages.

    Args:
        rust: a tokenizer of the ``tokenizers`` library; not modified.
    """

    def __init__(self, rust: Any) -> None:
        self._rust = rust
        self._added = cast(Mapping[int, Any], rust.get_added_tokens_decoder())
        control = {
            token_id: token
            for token_id, token in self._added.items()
            if token.content and (token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content))
        }
        texts = [cast(str, token.content) for token in control.values()]
        self._normalised = rust.normalizer is not None and any(token.normalized for token in control.values())
        self._ids = frozenset(control)
        self._names = {text: f"{_secret()}{n:0{_INDEX_DIGITS}}" for n, text in enumerate(texts)}
        self._finder = _Finder(texts)
        self._twin: Any = None

    def hiding(self) -> Hiding:
        """What hides the control tokens of one prompt's messages."""
        return Hiding(self._finder)

    def assembled(self, rendered: str, ids: list[int]) -> bool:
        """Whether there are more control tokens in the ids than in the text: normalisation made some, as of "＜s＞"."""  # noqa: RUF002
        if not self._normalised:
            return False
        return sum(map(self._ids.__contains__, ids)) > sum(1 for _ in self._finder.spans(rendered))

    def encode(self, rendered: str, hiding: Hiding, param: str) -> list[int]:
        """Return the ids of a prompt that was rendered from values hidden by ``hiding``.

        Raises InvalidRequestError for a tokenizer that cannot be copied.
        """
        self._twin = self._twin or self._make_twin(param)
        pieces: list[str] = []
        at = 0
        for start, end in self._finder.spans(rendered):
            pieces += (rendered[at:start], self._names[rendered[start:end]])
            at = end
        text = hiding.show("".join([*pieces, rendered[at:]]))
        return cast(list[int], self._twin.encode(text, add_special_tokens=False).ids)

    def _make_twin(self, param: str) -> Any:
        """The tokenizer with other names for its control tokens, and the same ids.

        Takes up to a second and as much memory as the tokenizer, once, when a message first needs it.
        """
        refusal = InvalidRequestError(
            f"{param} holds a control token, or a part of one, which this model's tokenizer cannot read as text",
            param=param,
        )
        try:
            state = cast(dict[str, Any], json.loads(self._rust.to_str()))
            for token in cast(list[dict[str, Any]], state["added_tokens"]):
                token["content"] = self._names.get(token["content"], token["content"])
            _rename(cast(dict[str, Any], state["model"]), self._names)
            state |= {"post_processor": None, "truncation": None, "padding": None}
            twin: Any = RustTokenizer.from_str(json.dumps(state))
        except Exception as error:  # a part written in Python; a vocabulary that needs what was renamed
            raise refusal from error
        for token_id, token in self._added.items():  # a copy hands out ids anew; wrong ones would be other tokens
            if twin.token_to_id(self._names.get(token.content, token.content)) != token_id:
                raise refusal
        return twin


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename control tokens in a vocabulary: they keep their ids, and no text is encoded to one as a whole."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): n for piece, n in cast(dict[str, int], vocabulary).items()}
    else:  # unigram: pieces with scores
        model["vocab"] = [[names.get(p, p), score] for p, score in cast(list[tuple[str, float]], vocabulary)]
    if unknown := model.get("unk_token"):
        model["unk_token"] = names.get(unknown, unknown)
    if merges := cast(list[list[str]], model.get("merges")):
        model["merges"] = [pair for pair in merges if names.keys().isdisjoint((*pair, "".join(pair)))]


class _Finder:
    """Finds the control tokens in a text, in time linear in it however it is made."""

    def __init__(self, texts: list[str]) -> None:
        length = max((n for n in range(1, 5) if len({t[:n] for t in texts}) <= _MOST_BEGINNINGS), default=0)
        self._beginnings = tuple({text[:length] for text in texts})
        # the automaton that tokenizers find added tokens with; all between two of them is one unknown word
        between = _secret()
        self._rust: Any = RustTokenizer(models.WordLevel({between: 0}, unk_token=between))
        self._rust.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
        # parts that are words alone, such as "s", would have to be hidden at the end of every other text
        self._heads = {t[:n] for t in texts for n in range(1, len(t)) if re.search(r"\W", t[:n])}
        self._tails = {t[n:] for t in texts for n in range(1, len(t) - 1) if re.search(r"\W", t[n:])}
        self._longest = max(map(len, texts), default=0)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where control tokens stand, in order: the leftmost first, and of those the longest."""
        at = 0
        while at < len(text):
            piece = text[at : at + _SLICE + self._longest]
            last = at + len(piece) == len(text)
            known = len(piece) if last else _SLICE  # a token that starts beyond may not be whole in this piece
            done = known
            for start, end in self._in_piece(piece):
                if start < known:
                    yield at + start, at + end
                    done = max(done, end)
            at += done

    def _in_piece(self, piece: str) -> list[tuple[int, int]]:
        if not any(beginning in piece for beginning in self._beginnings):
            return []
        try:
            found = self._rust.encode(piece, add_special_tokens=False)
        except TypeError:  # half of a surrogate pair, which encoding will refuse: here it is any one character
            found = self._rust.encode(piece.encode("utf-8", "replace").decode(), add_special_tokens=False)
        return [span for token_id, span in zip(found.ids, found.offsets, strict=True) if token_id != 0]

    def halves(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the end of a control token stands that the text starts with, and the start of one that it ends with.

        Spaces around it do not count, since templates trim.
        """
        start, stop = len(text) - len(text.lstrip()), len(text.rstrip())
        lengths = range(min(self._longest, stop - start), 0, -1)
        if length := next((n for n in lengths if text[start : start + n] in self._tails), 0):
            yield start, start + length
        if length := next((n for n in lengths if text[stop - n : stop] in self._heads), 0):
            yield stop - length, stop


class Hiding:
    """Hides the control tokens in the values of one prompt.

    Attributes:
        found: whether there were any.
    """

    def __init__(self, finder: _Finder) -> None:
        self._finder = finder
        self._secret = _secret()
        self._texts: list[str] = []

    @property
    def found(self) -> bool:
        return bool(self._texts)

    def __call__(self, value: Any) -> Any:
        """Return a value of JSON's kinds with every control token in it hidden; what was given is not modified."""
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, dict):
            return {self(key): self(item) for key, item in cast(dict[Any, Any], value).items()}
        if isinstance(value, list):
            return [self(item) for item in cast(list[Any], value)]
        return value

    def show(self, text: str) -> str:
        """Put back what was hidden."""
        first, *others = text.split(self._secret)
        pieces = [first]
        for other in others:
            index = other[:_INDEX_DIGITS]
            known = len(index) == _INDEX_DIGITS and index.isdecimal() and int(index) < len(self._texts)
            pieces += (self._texts[int(index)], other[_INDEX_DIGITS:]) if known else (other,)  # a template cut it
        return "".join(pieces)

    def _hide(self, text: str) -> str:
        spans = sorted([*self._finder.halves(text), *self._finder.spans(text)])
        if not spans:
            return text
        pieces: list[str] = []
        at = 0
        for start, end in _joined(spans):
            pieces += (text[at:start], f"{self._secret}{len(self._texts):0{_INDEX_DIGITS}}")
            self._texts.append(text[start:end])
            at = end
        return "".join([*pieces, text[at:]])


def _joined(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted spans, those that touch as one."""
    start, end = spans[0]
    for next_start, next_end in spans:
        if next_start > end:
            yield start, end
            start = next_start
        end = max(end, next_end)
    yield start, end
