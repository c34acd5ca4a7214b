"""Answers of ``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``: each input is a prompt that is only computed.

All inputs of a request are admitted together or refused together, and leave with their request. Scores are those of a
cross-encoder where the model is one, else cosines of vectors. numpy is loaded by the first request.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import orjson

from aserve.core.errors import InvalidRequestError
from aserve.core.pooling import PoolingParams
from aserve.core.request import GenerationRequest
from aserve.engine.embedding import Input, pooled_request, prompt_text, score_params, vector_params
from aserve.server.pooling_schema import EmbeddingRequest, PoolingFields, RerankRequest, ScoreRequest
from aserve.server.prepare import check_name
from aserve.server.reply import Reply
from aserve.server.usage import Usage
from aserve.server.whole_route import Exchange

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aserve.engine.engine import Engine

_LARGE_BYTES = 256 * 1024
_JSON = (b"content-type", b"application/json")


async def embeddings(engine: Engine, request: EmbeddingRequest, exchange: Exchange) -> Reply:
    """The vectors of all inputs, as numbers or as base64 of little-endian float32."""
    check_name(engine, request.model)
    params = vector_params(engine.abilities, dimensions=request.dimensions, normalize=request.normalize)
    prefix = prompt_text(engine.abilities, request.prompt_name)
    work = _Work(engine, request, exchange)
    with work.preparing(len(request.inputs), "input"):
        for value in request.inputs:
            await work.add(value, params, prefix=prefix, special=request.add_special_tokens is not False)
    vectors = await work.run()
    shown = [_base64(vector) for vector in vectors] if request.encoding_format == "base64" else vectors
    data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(shown)]
    return await _reply({"object": "list", "data": data, "model": request.model, "usage": work.usage()})


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.tobytes()).decode()


async def score(engine: Engine, request: ScoreRequest, exchange: Exchange) -> Reply:
    """How well each pair of texts goes together."""
    check_name(engine, request.model)
    work = _Work(engine, request, exchange)
    scores = await _scores(work, request.pairs, ("text_1", "text_2"), (None, None))
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return await _reply(
        {
            "id": f"score-{work.id}",
            "object": "list",
            "created": int(time.time()),
            "model": request.model,
            "data": data,
            "usage": work.usage(),
        }
    )


async def rerank(engine: Engine, request: RerankRequest, exchange: Exchange) -> Reply:
    """The documents by falling score with the query."""
    check_name(engine, request.model)
    work = _Work(engine, request, exchange)
    names = tuple(_first_known(engine, *known) for known in (("query",), ("document", "passage", "corpus")))
    pairs = [(request.query, document) for document in request.documents]
    scores = await _scores(work, pairs, ("query", "documents"), (names[0], names[1]))
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    results: list[dict[str, Any]] = []
    for index in order:
        entry: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.return_documents is not False:
            entry["document"] = {"text": request.documents[index]}
        results.append(entry)
    return await _reply({"id": f"rerank-{work.id}", "model": request.model, "usage": work.usage(), "results": results})


def _first_known(engine: Engine, *names: str) -> str | None:
    """The first of these that is a prompt of the model; None for its default."""
    return next((name for name in names if name in engine.abilities.prompts), None)


async def _scores(
    work: _Work, pairs: Sequence[tuple[str, str]], params: tuple[str, str], prompts: tuple[str | None, str | None]
) -> list[float]:
    """The score of each pair. ``params`` name the fields of first and second texts, ``prompts`` what goes before."""
    abilities = work.engine.abilities
    pooling = score_params(abilities)
    if abilities.is_cross_encoder:
        with work.preparing(len(pairs), params[1]):
            for pair in pairs:
                await work.add_pair(pair, pooling, param=params[1])
        return [float(vector[0]) for vector in await work.run()]
    places: dict[tuple[int, str], int] = {}
    prefixes = [prompt_text(abilities, name) for name in prompts]
    texts = dict.fromkeys((side, pair[side]) for pair in pairs for side in (0, 1))  # each is computed once
    with work.preparing(len(texts), params[1]):
        for place, (side, text) in enumerate(texts):
            places[side, text] = place
            await work.add(text, pooling, prefix=prefixes[side], param=params[side])
    vectors = await work.run()
    return [float(vectors[places[0, a]] @ vectors[places[1, b]]) for a, b in pairs]


class _Work:
    """The inputs of one request on their way through the engine."""

    def __init__(self, engine: Engine, request: PoolingFields, exchange: Exchange) -> None:
        self.engine = engine
        self.id = uuid.uuid4().hex
        self._request = request
        self._exchange = exchange
        self._requests: list[GenerationRequest] = []
        self._num_tokens = 0
        truncate = request.truncate_prompt_tokens
        longest = engine.capacity.max_length
        self._max_tokens = None if truncate is None else longest if truncate < 0 else min(truncate, longest)

    @contextmanager
    def preparing(self, count: int, param: str) -> Generator[None]:
        """The time in which inputs are added, which the end of the request interrupts; they count as waiting.

        Raises InvalidRequestError for more than can ever be admitted, QueueFullError.
        """
        most = self.engine.max_sequences
        if count > most:
            raise InvalidRequestError(
                f"{count} inputs need as many places; this server has {most}, in the batch and in the queue together",
                param=param,
            )
        with self._exchange.scope.interruptible(), self.engine.preparing(count):
            yield

    async def add(
        self, value: Input, params: PoolingParams, *, prefix: str = "", special: bool = True, param: str = "input"
    ) -> None:
        """Encode an input. Raises InvalidRequestError, ContextLengthError."""
        ids = await self.engine.encode_input(
            value, prefix=prefix, add_special_tokens=special, truncate=self._max_tokens, param=param
        )
        self._append(ids, params, param)

    async def add_pair(self, pair: tuple[str, str], params: PoolingParams, *, param: str) -> None:
        """Encode two texts as one input."""
        ids, second_start = await self.engine.encoder.encode_input(pair, max_tokens=self._max_tokens, param=param)
        self._append(ids, replace(params, second_start=second_start), param)

    def _append(self, ids: Sequence[int], params: PoolingParams, param: str) -> None:
        if not ids:
            raise InvalidRequestError("the input has no tokens", param=param)
        self._num_tokens += len(ids)
        self._requests.append(
            pooled_request(
                f"pool-{self.id}-{len(self._requests)}",
                ids,
                params,
                priority=self._request.priority or 0,
                cache_salt=(self._request.cache_salt or "").encode(),
            )
        )

    async def run(self) -> list[NDArray[np.float32]]:
        """The vectors of all that was added. Raises what entering a generation raises, GenerationError."""
        import numpy as np

        scope = self._exchange.scope
        self._exchange.record.usage = Usage(self._num_tokens, 1)
        async with self.engine.pool_all(self._requests) as pooled:
            for each in pooled:
                scope.attach(each)
            return [np.frombuffer(await each.vector(), "<f4") for each in pooled]

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}


async def _reply(value: dict[str, Any]) -> Reply:
    """The answer as JSON; long ones are written in a worker thread."""
    num_bytes = sum(len(entry.get("embedding", "")) * 10 for entry in value.get("data", ()))
    body = _dump(value) if num_bytes < _LARGE_BYTES else await anyio.to_thread.run_sync(_dump, value)
    return Reply(200, body, [_JSON])


def _dump(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
