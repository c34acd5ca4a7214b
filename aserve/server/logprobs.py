"""Log-probabilities as the two routes report them.

Made only for requests that ask for them. Minus infinity (a token that cannot be sampled) is not JSON and becomes
-9999. Tokens that are not UTF-8 by themselves are written as OpenAI does: ``bytes:`` and their escaped bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aserve.core.request import TokenLogprobs

LOWEST = -9999.0

TokenBytes = Callable[[int], bytes]


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def token_text(raw: bytes) -> str:
    """The token as text; ``bytes:\\xf0\\x9f`` when it is only a part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatLogprobs:
    """Entries of ``choices[].logprobs.content``."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def content(self, entries: tuple[TokenLogprobs, ...]) -> list[dict[str, Any]]:
        return [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes(token_id)
        return {"token": token_text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """``choices[].logprobs`` of one choice of plain completions: parallel lists, growing with the text.

    ``text_offset`` counts the characters before each token, from the bytes of all tokens so far.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._characters = 0

    def lists(self, entries: tuple[TokenLogprobs, ...]) -> dict[str, list[Any]]:
        tokens: list[str] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for entry in entries:
            raw = self._token_bytes(entry.token_id)
            text = token_text(raw)
            tokens.append(text)
            logprobs.append(_finite(entry.logprob))
            top = {token_text(self._token_bytes(i)): _finite(value) for i, value in entry.top}
            top.setdefault(text, _finite(entry.logprob))
            tops.append(top)
            inside = bool(raw) and raw[0] & 0xC0 == 0x80 and self._characters > 0  # continues a character
            offsets.append(self._characters - inside)
            self._characters += sum(byte & 0xC0 != 0x80 for byte in raw)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
