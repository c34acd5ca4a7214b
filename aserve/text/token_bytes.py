"""The exact bytes of each token, worked out from the tokenizer's decoder.

Two kinds of decoder turn tokens into bytes one by one: byte-level (each character of a token stands for a byte) and
sentencepiece with byte fallback (a token is text, or one raw byte written ``<0x0A>``). For these a table of bytes and
one UTF-8 decoder are all that detokenising needs. Any other decoder looks at several tokens at once and has no table.
Called by the tokenizer; knows nothing of requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled on first use (a whole vocabulary costs 0.2 s). Unknown and hidden ids have no bytes.

    Safe to share between threads: two that miss at once store the same value.
    """

    def __init__(
        self, piece_of: Callable[[int], str | None], to_bytes: Callable[[str], bytes], hidden: Collection[int] = ()
    ) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._piece_of = piece_of
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        try:
            piece = self._piece_of(token_id)
        except OverflowError:  # negative, or beyond 32 bits
            return b""
        value = self[token_id] = b"" if piece is None else self._to_bytes(piece)
        return value


@dataclass(frozen=True, slots=True)
class ByteScheme:
    """How pieces become bytes.

    Attributes:
        to_bytes: piece to bytes.
        strip: this many leading ``strip_character`` of a whole text are dropped.
    """

    to_bytes: Callable[[str], bytes]
    strip: int = 0
    strip_character: str = " "


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, as GPT-2 defined it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def _byte_level(alphabet: Mapping[str, int], piece: str) -> bytes:
    try:
        return bytes([alphabet[c] for c in piece])
    except KeyError:  # an added token with, say, a space in it: its text is taken as it is, as the decoder does
        return piece.encode()


def _byte_fallback(replacements: tuple[tuple[str, str], ...], raw_bytes: bool, piece: str) -> bytes:
    for old, new in replacements:
        piece = piece.replace(old, new)
    if raw_bytes and (match := _RAW_BYTE.fullmatch(piece)):
        return bytes([int(match.group(1), 16)])
    return piece.encode()


def byte_scheme(decoder: Any) -> ByteScheme | None:
    """Read a decoder of the ``tokenizers`` library; None if it does not work token by token."""
    if decoder is None:
        return None
    try:
        state = cast(dict[str, Any], json.loads(decoder.__getstate__()))
    except Exception:  # a decoder written in Python cannot be looked into
        return None
    steps = cast(list[dict[str, Any]], state["decoders"] if state["type"] == "Sequence" else [state])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteScheme(partial(_byte_level, byte_alphabet()))
    return _fallback_scheme(steps, kinds)


def _fallback_scheme(steps: list[dict[str, Any]], kinds: list[str]) -> ByteScheme | None:
    """``Replace* ByteFallback? Fuse Strip?``, the shape of every sentencepiece decoder in Hugging Face form."""
    if not re.fullmatch(r"(Replace )*(ByteFallback )?Fuse (Strip )?", "".join(f"{kind} " for kind in kinds)):
        return None
    replacements: list[tuple[str, str]] = []
    strip, character = 0, " "
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                return None
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip":
            if step["stop"]:
                return None
            strip, character = step["start"], step["content"]
    to_bytes = partial(_byte_fallback, tuple(replacements), "ByteFallback" in kinds)
    return ByteScheme(to_bytes, strip, character)
