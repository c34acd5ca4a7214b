"""How a prompt becomes one vector, as plain values: what a request asks for, and what a served model can do.

A request with ``PoolingParams`` is a prefill and nothing else: it is over when its prompt has been computed. Plain
values, so that they can travel to another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Task = Literal["generate", "embed", "score"]
"""What a model can be asked for: answers, vectors of texts, and how well two texts go together."""


class PoolingKind(StrEnum):
    """Which hidden states the vector is made of."""

    LAST = "last"
    """That of the last token."""

    MEAN = "mean"
    """The mean over all tokens."""

    FIRST = "first"
    """That of the first token, which encoders are trained to sum up the text in."""

    CLASSES = "classes"
    """The scores of the model's classification head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How one prompt is pooled.

    Attributes:
        normalize: scale the vector to length 1.
        dimensions: keep so many leading numbers, before normalisation; None keeps all.
        second_start: index of the first token of a pair's second text, for encoders that tell them apart; 0: no pair.
    """

    kind: PoolingKind
    normalize: bool = True
    dimensions: int | None = None
    second_start: int = 0

    @property
    def needs_every_token(self) -> bool:
        """Whether a position whose hidden state is not computed, being in the prefix cache, would be missing."""
        return self.kind is not PoolingKind.LAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a served model can be asked for.

    Attributes:
        tasks: in the order in which they are shown.
        kind, normalize: how its vectors are made.
        size: numbers in a vector; 0 where nobody has looked.
        matryoshka: whether leading parts of a vector are vectors, too (Kusupati et al. 2022), of any size if
            ``matryoshka_sizes`` is empty, else of these.
        prompts: texts to put before an input, by name.
        default_prompt: the name of that which is used when none is named.
        lowercase: whether texts are to be in lower case.
        is_cross_encoder: whether a pair of texts is scored together, by ``PoolingKind.CLASSES``; else by the cosine
            of their vectors.
    """

    tasks: tuple[Task, ...] = ("generate", "embed", "score")
    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    size: int = 0
    matryoshka: bool = False
    matryoshka_sizes: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    lowercase: bool = False
    is_cross_encoder: bool = False
