"""From texts and token ids to what is pooled: what a model's abilities allow, its prompts, and the requests.

Used by ``Engine.embed`` and by the server's pooling routes, so that both refuse the same and make the same vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from aserve.core.errors import InvalidRequestError, TaskNotOfferedError
from aserve.core.pooling import Abilities, PoolingKind, PoolingParams, Task
from aserve.core.request import GenerationRequest, SamplingParams

Input = str | Sequence[int]
"""A text, or token ids that are taken as they are."""

_ROUTES: Mapping[Task, tuple[str, str]] = {
    "generate": ("answers", "/v1/chat/completions or /v1/completions"),
    "embed": ("vectors of texts", "/v1/embeddings"),
    "score": ("scores of pairs of texts", "/v1/score or /v1/rerank"),
}
_NOTHING = SamplingParams(max_tokens=1)


def as_inputs(inputs: Input | Sequence[Input]) -> list[Input]:
    """Several inputs; a single one is a list of one. Raises InvalidRequestError if there is none."""
    if isinstance(inputs, str):
        return [inputs]
    if not len(inputs):
        raise InvalidRequestError("there is no input", param="input")
    if isinstance(inputs[0], str) or hasattr(inputs[0], "__len__"):
        return cast("list[Input]", list(inputs))
    return [cast("Sequence[int]", inputs)]


def require(abilities: Abilities, task: Task) -> None:
    """Raise TaskNotOfferedError, which says what to use in place, unless the model can do this."""
    if task not in abilities.tasks:
        others = "; ".join(f"for {_ROUTES[other][0]} use {_ROUTES[other][1]}" for other in abilities.tasks)
        raise TaskNotOfferedError(f"this model does not make {_ROUTES[task][0]}; {others}")


def vector_params(
    abilities: Abilities, *, dimensions: int | None = None, normalize: bool | None = None
) -> PoolingParams:
    """How inputs are pooled. Raises TaskNotOfferedError, InvalidRequestError for dimensions that there are not."""
    require(abilities, "embed")
    if dimensions == abilities.size:
        dimensions = None
    if dimensions is not None:
        _check_dimensions(abilities, dimensions)
    return PoolingParams(
        kind=abilities.kind,
        normalize=abilities.normalize if normalize is None else normalize,
        dimensions=dimensions,
    )


def _check_dimensions(abilities: Abilities, dimensions: int) -> None:
    sizes = abilities.matryoshka_sizes
    if not abilities.matryoshka:
        problem = f"its vectors have {abilities.size} numbers and are not made to be cut"
    elif sizes and dimensions not in sizes:
        problem = f"its vectors can have {', '.join(map(str, sorted({*sizes, abilities.size})))} numbers"
    elif not 1 <= dimensions <= abilities.size:
        problem = f"its vectors can have 1 to {abilities.size} numbers"
    else:
        return
    raise InvalidRequestError(f"'dimensions' cannot be {dimensions} for this model: {problem}", param="dimensions")


def score_params(abilities: Abilities) -> PoolingParams:
    """How pairs are pooled, or their texts one by one. Raises TaskNotOfferedError."""
    require(abilities, "score")
    if abilities.is_cross_encoder:
        return PoolingParams(kind=PoolingKind.CLASSES, normalize=False)
    return PoolingParams(kind=abilities.kind, normalize=True)


def prompt_text(abilities: Abilities, name: str | None) -> str:
    """What goes before a text: the model's prompt of this name. Raises InvalidRequestError if there is none."""
    name = abilities.default_prompt if name is None else name
    if name is None:
        return ""
    if name not in abilities.prompts:
        known = ", ".join(abilities.prompts) or "none"
        raise InvalidRequestError(f"the model has no prompt of this name; its prompts: {known}", param="prompt_name")
    return abilities.prompts[name]


def pooled_request(
    request_id: str, token_ids: Sequence[int], params: PoolingParams, *, priority: int = 0, cache_salt: bytes = b""
) -> GenerationRequest:
    """The request for one vector."""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(token_ids),
        sampling=_NOTHING,
        priority=priority,
        cache_salt=cache_salt,
        pooling=params,
    )
