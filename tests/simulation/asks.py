"""One client's part of a scenario: what it asks, and how it behaves while it waits.

Used by the scenario to draw clients, by the clients to act and by the verdict to judge. Knows the wire format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from aserve.core.capacity import Capacity
from tests.simulation.determinism import Chance
from tests.simulation.model import BOS, POISON, Expected, expect_choices

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "M"
KEY = "key"
Via = Literal["http", "stream", "generation", "probe"]
Manner = Literal["stays", "leaves", "half body", "stuck", "slow", "deadline"]
STEMS = ("", "abcdefgh", "abcdefghijklmnop", "xyz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of one client.

    Attributes:
        at_s: when it begins.
        via: over HTTP, as a ``ChatStream`` or a ``Generation`` of an embedding program, or as a probe of /health.
        manner: ``stays`` to the end, ``leaves`` at ``leaves_s`` (embedded: is cancelled, breaks off or closes),
            sends ``half body`` and no more, is ``stuck`` (takes ``takes_sends`` parts, then none), is ``slow`` (each
            part takes ``send_s``), or has a ``deadline``.
        refused: the status of a request that is wrong in itself; None for a valid one.
        parts: the body, in parts that come ``part_s`` apart.
        raises: sending to a client that has left raises OSError, as under some servers.
        expected: by choice; of all prompts, in order.
    """

    index: int
    at_s: float
    via: Via
    manner: Manner
    path: str = COMPLETIONS
    fields: dict[str, Any] = field(default_factory=dict)
    headers: tuple[tuple[bytes, bytes], ...] = ()
    parts: tuple[bytes, ...] = ()
    part_s: float = 0.0
    refused: int | None = None
    leaves_s: float = 0.0
    takes_sends: int = 0
    send_s: float = 0.0
    raises: bool = False
    way: str = ""
    expected: tuple[Expected, ...] = ()
    num_prompts: int = 1

    @property
    def stream(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def fails(self) -> bool:
        """Whether some choice comes to no number."""
        return any(choice.finish == "error" for choice in self.expected)


def draw_ask(chance: Chance, index: int, capacity: Capacity, *, at_s: float, calm: bool) -> Ask:
    """A request; ``calm`` ones are valid, and their clients stay."""
    via: Via = chance.choices(("http", "stream", "generation", "probe"), (10, 2, 2, 1))[0]  # type: ignore[assignment]
    if via == "probe":
        return Ask(index=index, at_s=at_s, via=via, manner="stays")
    manner = _draw_manner(chance, via, calm=calm)
    chat = via != "generation" and chance.flip(0.4)
    prompts = [
        _draw_prompt(chance, capacity) for _ in range(1 if chat or via != "http" else chance.choice((1, 1, 1, 2)))
    ]
    fields: dict[str, Any] = {
        "model": MODEL,
        "seed": chance.randrange(1000),
        "max_tokens": chance.choice((1, 2, 6, 12, 20, 30)),
        "n": chance.choice((1, 1, 1, 2, 3)),
    }
    if chance.flip(0.25):
        fields["stop"] = chance.choice((["e"], ["th", "h"], ["a", "q", "xy"]))
        if chance.flip(0.4):  # an end in two ways at once
            fields["seed"] += 7 - fields["seed"] % POISON
    if chance.flip(0.5):
        fields["ignore_eos"] = True
    fields["priority"] = chance.randint(-1, 1)
    if chat:
        fields["messages"] = [{"role": "user", "content": prompts[0]}]
    else:
        fields["prompt"] = prompts if len(prompts) > 1 else prompts[0]
    drawn: dict[str, Any] = {"path": CHAT if chat else COMPLETIONS, "num_prompts": len(prompts)}
    if via == "http":
        drawn |= _draw_http(chance, fields, manner, calm=calm)
    else:
        drawn["way"] = chance.choice(("cancel", "break", "close")) if manner == "leaves" else ""
    drawn.setdefault("leaves_s", chance.choice((0.0, chance.uniform(0, 0.05), chance.uniform(0, 0.4))))
    expected: tuple[Expected, ...] = ()
    if drawn.get("refused") is None:
        expected = tuple(choice for text in prompts for choice in _expected(text, fields, capacity))
    return Ask(index=index, at_s=at_s, via=via, manner=manner, fields=fields, expected=expected, **drawn)


def _draw_manner(chance: Chance, via: Via, *, calm: bool) -> Manner:
    if calm:
        return "stays"
    if via != "http":
        return chance.choices(("stays", "leaves", "deadline"), (4, 4, 1))[0]  # type: ignore[return-value]
    manners = ("stays", "leaves", "half body", "stuck", "slow", "deadline")
    return chance.choices(manners, (8, 6, 1, 2, 2, 2))[0]  # type: ignore[return-value]


def _draw_prompt(chance: Chance, capacity: Capacity) -> str:
    """Short enough for an answer, and often with a beginning that others share."""
    text = chance.choice(STEMS) + "".join(chance.choices("abcxyz", k=chance.randint(1, 8)))
    return text[: max(1, min(len(text), capacity.max_length - 3))]


def _expected(text: str, fields: dict[str, Any], capacity: Capacity) -> list[Expected]:
    prompt = [BOS, *text.encode()]
    return expect_choices(
        prompt,
        fields["seed"],
        min(fields["max_tokens"], capacity.max_new_tokens(len(prompt))),
        fields["n"],
        stop=fields.get("stop", ()),
        ignore_eos=fields.get("ignore_eos", False),
    )


def _draw_http(chance: Chance, fields: dict[str, Any], manner: Manner, *, calm: bool) -> dict[str, Any]:
    """The body and its way, and now and then a mistake in it. Changes ``fields``."""
    fields["stream"] = chance.flip(0.7)
    if fields["stream"] and chance.flip(0.3):
        fields["stream_options"] = {"include_usage": True}
    kind, refused = b"application/json", None
    raw: bytes | None = None
    if not calm and chance.flip(0.12):
        refused, kind, raw = _spoil(chance, fields)
    raw = json.dumps(fields).encode() if raw is None else raw
    drawn: dict[str, Any] = {"refused": refused, "parts": (raw,), "raises": chance.flip(0.3)}
    if manner == "half body":
        drawn["parts"] = (raw[: len(raw) // 2],)
        drawn["way"] = chance.choice(("leaves", "waits"))
    elif chance.flip(0.3):
        cut = chance.randrange(len(raw))
        drawn |= {"parts": (raw[:cut], raw[cut:]), "part_s": chance.choice((0.0, 0.01, 0.3))}
    headers = [(b"content-type", kind), (b"authorization", b"Bearer " + KEY.encode())]
    if manner == "deadline":
        limit = chance.choice((0.001, 0.05, 0.5))
        name = chance.choice((b"x-request-timeout", b"x-request-timeout", b"x-queue-timeout", b"x-idle-timeout"))
        headers.append((name, str(limit).encode()))
        drawn["leaves_s"] = limit
    if manner == "stuck":
        drawn["takes_sends"] = chance.randint(0, 5)
    if manner == "slow":
        drawn["send_s"] = chance.choice((0.01, 0.3, 1.0))
    return drawn | {"headers": tuple(headers)}


def _spoil(chance: Chance, fields: dict[str, Any]) -> tuple[int, bytes, bytes | None]:
    """Make a mistake in a request: the status that it must get, its content type, and its body if not ``fields``."""
    match chance.randrange(6):
        case 0:
            fields["max_tokens"] = 0
        case 1:
            fields["model"] = "other"
            return 404, b"application/json", None
        case 2:
            return 415, b"text/plain", None
        case 3:
            fields["user"] = "x" * 3000
            return 413, b"application/json", None
        case 4:
            return 400, b"application/json", b'{"model": '
        case _:
            fields["n"] = 1000
    return 400, b"application/json", None
