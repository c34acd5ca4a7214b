"""The model of the simulation, and what it must say to a prompt whatever happens around it.

A token is a function of all tokens before it, read back through the block table by ``FakeExecutor``, and of the seed.
Used by the executor to generate and by the clients to judge.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from zlib import crc32

from aserve.core.capacity import Capacity
from aserve.core.step import INVALID_TOKEN, StepPlan, StepResult
from aserve.engine.sequences import choice_seed
from aserve.testing import FakeExecutor
from aserve.text.detokenizer import ByteDetokenizer

BOS, EOS, VOCAB_SIZE = 256, 257, 260
POISON = 17
STOPPING = frozenset(b"aehy")
"""Seeds that leave remainder 7 give a model whose output is not a number now and then, and often behind ``STOPPING``:
letters with which stop strings end."""

_SHOWN = MappingProxyType({i: bytes([i]) if i < 256 else b"" for i in range(VOCAB_SIZE)})
_RAW = MappingProxyType({i: bytes([i]) if i < 256 else b"<special>" for i in range(VOCAB_SIZE)})


class ByteTokenizer:
    """One token per byte, and four special ones; nothing to load."""

    vocab_size = VOCAB_SIZE
    stop_token_ids = (EOS,)
    generation_defaults = MappingProxyType({"temperature": 0.5})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_chat(self, messages: Sequence[dict[str, str]], **_: object) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def token_bytes(self, token_id: int) -> bytes:
        return _RAW[token_id]

    def detokenizer(self, *, skip_special_tokens: bool = True) -> ByteDetokenizer:
        return ByteDetokenizer(_SHOWN if skip_special_tokens else _RAW)


def next_token(token_ids: list[int], seed: int) -> int:
    """Letters, now and then the end of text, and for poisoned seeds now and then no number."""
    value = crc32(array("q", token_ids).tobytes(), seed & 0xFFFFFFFF)
    if seed % POISON == 7 and value % (2 if token_ids[-1] in STOPPING else 7) == 0:
        return INVALID_TOKEN
    return EOS if value % 31 == 1 else 97 + value % 26


@dataclass(frozen=True, slots=True)
class Expected:
    """One choice of an isolated run. ``finish`` is ``stop``, ``length``, or ``error`` behind the text so far."""

    text: str
    finish: str
    num_tokens: int


def expect(
    prompt: Sequence[int], seed: int, max_tokens: int, *, stop: Sequence[str] = (), ignore_eos: bool = False
) -> Expected:
    """What a request must come to."""
    tokens, text = list(prompt), ""
    for count in range(1, max_tokens + 1):
        token = next_token(tokens, seed)
        if token == INVALID_TOKEN:
            return Expected(text, "error", count - 1)
        tokens.append(token)
        if token == EOS and not ignore_eos:
            return Expected(text, "stop", count)
        if token != EOS:
            text += chr(token)
            ending = [word for word in stop if text.endswith(word)]
            if ending:
                return Expected(text[: -max(map(len, ending))], "stop", count)
    return Expected(text, "length", max_tokens)


def expect_choices(prompt: Sequence[int], seed: int, max_tokens: int, n: int, **options: object) -> list[Expected]:
    """What each of ``n`` choices must come to."""
    return [expect(prompt, choice_seed(seed, i), max_tokens, **options) for i in range(n)]  # type: ignore[arg-type]


class SimulatedExecutor(FakeExecutor):
    """FakeExecutor over the model above, whose steps can fail.

    Args:
        on_submit: told of each plan before it is computed.
        fails: asked before each submission (``submit``) and each result (``wait``) whether this one raises.
    """

    def __init__(
        self, capacity: Capacity, *, on_submit: Callable[[StepPlan], None], fails: Callable[[str, int], bool]
    ) -> None:
        super().__init__(capacity, next_token=next_token)
        self._on_submit = on_submit
        self._fails = fails

    def submit(self, plan: StepPlan) -> None:
        self._on_submit(plan)
        if self._fails("submit", plan.step_id):
            raise RuntimeError(f"injected failure at the submission of step {plan.step_id}")
        super().submit(plan)

    def wait(self) -> StepResult:
        result = super().wait()
        if self._fails("wait", result.step_id):
            raise RuntimeError(f"injected failure in step {result.step_id}")
        return result

    def scribble(self, block_ids: Iterable[int]) -> None:
        """Spoil what nobody may read any more: these blocks, and all of the host's memory."""
        size = self.capacity.block_size
        for block_id in block_ids:
            self._cache[block_id] = [-7] * size
        self._host_cache = [[-7] * size for _ in self._host_cache]
