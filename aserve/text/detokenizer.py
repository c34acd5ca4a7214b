"""Token ids to text, piece by piece, for one choice of one request.

Never emits half a character and loses nothing: everything pushed, plus ``finish``, is the text of all ids together.
At most the 3 bytes of an unfinished character are held back. Broken UTF-8 becomes U+FFFD and swallows no neighbour.
Pure: no threads, no clock. Made by ``Tokenizer.detokenizer``, driven by the engine's generation.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

_MAX_HELD_TOKENS = 8
"""A window that ends in U+FFFD waits this many tokens for the rest of the character: 4 bytes, and room to spare."""


class Detokenizer(Protocol):
    """Turns the ids of one sequence into text, in order."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return the text that has become certain."""
        ...

    def finish(self) -> str:
        """Return what was still held back. Nothing may be pushed afterwards."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes (see ``token_bytes``): a table look-up and a UTF-8 decoder.

    Equal to the ``tokenizers`` decoder, but for one case: in a run of sentencepiece byte tokens that is not valid
    UTF-8 the library gives up the whole run, good characters included. Here only the broken bytes are replaced.
    """

    __slots__ = ("_strip", "_strip_character", "_table", "_tail")

    def __init__(self, table: Mapping[int, bytes], strip: int = 0, strip_character: str = " ") -> None:
        self._table = table
        self._tail = b""
        self._strip = strip
        self._strip_character = strip_character

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if len(token_ids) == 1:
            return self._decode(self._tail + table[token_ids[0]], final=False)
        return self._decode(self._tail + b"".join([table[i] for i in token_ids]), final=False)

    def finish(self) -> str:
        return self._decode(self._tail, final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        text, used = utf_8_decode(data, "replace", final)
        self._tail = data[used:]
        while self._strip and text:
            if text[0] != self._strip_character:
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        return text


class WindowDetokenizer:
    """For any other decoder: decode a short window twice, with and without the newest ids, and emit the difference.

    The window starts where the last but one emission ended, so that decoders which look at neighbours (spaces between
    words, for example) see them. Cost per token depends on the window, not on the length of the text.
    """

    __slots__ = ("_decode", "_hidden", "_ids", "_num_emitted", "_seen")

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: Collection[int] = ()) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids: list[int] = []  # the window
        self._num_emitted = 0  # the first ids of the window, whose text is out
        self._seen = ""  # their text

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += [i for i in token_ids if i not in self._hidden and i >= 0]
        num_held = len(self._ids) - self._num_emitted
        if not num_held:
            return ""
        text = self._decode(self._ids)
        if (text.endswith("\ufffd") or len(text) <= len(self._seen)) and num_held <= _MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return self._emit(self._decode(self._ids)) if len(self._ids) > self._num_emitted else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._seen) :]
        del self._ids[: self._num_emitted]
        self._num_emitted = len(self._ids)
        self._seen = self._decode(self._ids)
        return new
