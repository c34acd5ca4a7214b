"""Any tokens, cut anywhere, with any stop strings: the stream says what the whole text says, in events that parse."""

from __future__ import annotations

import json
from typing import Any

import atheris

from aserve.core.request import FinishReason, TextDelta, TokenLogprobs
from aserve.server.prepare import Job
from aserve.server.sse import ChatFrames, CompletionFrames
from aserve.server.usage import Usage
from aserve.text.detokenizer import ByteDetokenizer
from aserve.text.stop_strings import StopMatcher

SEEDS: list[Any] = [b"", b"\x02ab\x00cdabcab", "é\u2028€😀\x85".encode(), b"\xf0\x9f\x98\xff\x80abc", b"aaaaab" * 8]
_TABLE = {n: bytes([n]) for n in range(256)}


def check(data: bytes) -> None:
    given = atheris.FuzzedDataProvider(data)
    stops = tuple(s for s in (given.ConsumeUnicodeNoSurrogates(3) for _ in range(given.ConsumeIntInRange(0, 3))) if s)
    include = given.ConsumeBool()
    cuts = [given.ConsumeIntInRange(1, 4) for _ in range(8)]
    tokens = given.ConsumeBytes(200)
    text = tokens.decode("utf-8", "replace")
    pieces = _detokenized(tokens, cuts)
    assert "".join(pieces) == text
    shown, matched = _stopped(pieces, stops, include=include)
    assert (shown, matched) == _stopped_at_once(text, stops, include=include)
    for chat in (True, False):
        assert _streamed(pieces, chat=chat) == text


def _detokenized(tokens: bytes, cuts: list[int]) -> list[str]:
    detokenizer = ByteDetokenizer(_TABLE)
    pieces: list[str] = []
    start = number = 0
    while start < len(tokens):
        size = cuts[number % len(cuts)]
        pieces.append(detokenizer.push(list(tokens[start : start + size])))
        assert "\ufffd" not in pieces[-1] or "\ufffd" in tokens.decode("utf-8", "replace")
        start, number = start + size, number + 1
    return [*pieces, detokenizer.finish()]


def _stopped(pieces: list[str], stops: tuple[str, ...], *, include: bool) -> tuple[str, bool]:
    matcher = StopMatcher(stops, include)
    shown = ""
    for piece in pieces:
        more, matched = matcher.push(piece)
        shown += more
        if matched:
            return shown, True
    return shown + matcher.finish(), False


def _stopped_at_once(text: str, stops: tuple[str, ...], *, include: bool) -> tuple[str, bool]:
    """The match that ends first wins; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text.endswith(stop, 0, end)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


def _streamed(pieces: list[str], *, chat: bool) -> str:
    job = Job(
        id="j",
        created=1,
        model='M"',
        chat=chat,
        requests=(None,),
        num_choices=1,
        logprobs=True,
        stream=True,  # type: ignore[arg-type]
    )
    usage = Usage(1, 1)
    frames = (ChatFrames if chat else CompletionFrames)(job, usage, _TABLE.__getitem__)
    out = b""
    for number, piece in enumerate(pieces):
        reason = FinishReason.STOP if number == len(pieces) - 1 else None
        logprobs = (TokenLogprobs(number % 256, float("-inf"), ((255, -1.0),)),)
        out += frames.delta(TextDelta(0, piece, (number % 256,), logprobs, reason, 0))
    out += frames.end()
    assert out.isascii()
    text = ""
    for event in out.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        assert event.startswith("data: ") and "\n" not in event
        choice = json.loads(event[6:])["choices"][0]
        text += choice["delta"].get("content", "") if chat else choice["text"]
    return text
