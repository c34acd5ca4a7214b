"""Gemma 3 (Gemma Team 2025), the text models: Gemma 2 plus norms over heads of queries and keys, minus the caps.

Five of six layers have a window and a rope of their own, as the spec says. Of the models that also see images, the
text part is served: the weights of the rest are left where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from aserve.layers.weights import WeightRow
from aserve.models.gemma2 import Gemma2
from aserve.models.llama import HEAD_NORM_WEIGHTS


class Gemma3(Gemma2):
    """Satisfies ``Model``."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (*Gemma2.WEIGHTS, *HEAD_NORM_WEIGHTS)


class Gemma3WithImages(Gemma3):
    """The text part of a checkpoint with a vision tower, under the names of transformers 4 or 5."""

    PREFIXES: ClassVar[Mapping[str, str]] = {"language_model.": "", "model.language_model.": "model."}
    IGNORED: ClassVar[tuple[str, ...]] = (
        *Gemma3.IGNORED,
        "*vision_tower.*",
        "*multi_modal_projector.*",
    )
