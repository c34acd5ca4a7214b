"""The table of POST routes that are answered in one piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from aserve.core.errors import RequestNotFoundError
from aserve.server.ingress import Ingress
from aserve.server.pooling import embeddings, rerank, score
from aserve.server.pooling_schema import read_embedding_request, read_rerank_request, read_score_request
from aserve.server.reply import Reply, json_reply
from aserve.server.running import RunningRequests
from aserve.server.text_schema import (
    AbortRequest,
    read_abort_request,
    read_detokenize_request,
    read_tokenize_request,
)
from aserve.server.texts import detokenize, tokenize
from aserve.server.whole_route import Exchange, WholeRoute

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

ABORT = "/abort"

WHOLE_ROUTES: Mapping[str, Callable[[Ingress], WholeRoute[Any]]] = {
    "/v1/embeddings": partial(WholeRoute, read=read_embedding_request, make=embeddings),
    "/v1/score": partial(WholeRoute, read=read_score_request, make=score),
    "/v1/rerank": partial(WholeRoute, read=read_rerank_request, make=rerank),
    "/tokenize": partial(WholeRoute, read=read_tokenize_request, make=tokenize),
    "/detokenize": partial(WholeRoute, read=read_detokenize_request, make=detokenize),
}


def abort_route(ingress: Ingress, running: RunningRequests) -> WholeRoute[AbortRequest]:
    """``/abort``: ends a request of the same caller by its id."""

    async def make(engine: Engine, request: AbortRequest, exchange: Exchange) -> Reply:
        count = running.abort(request.request_id, exchange.caller)
        if not count:
            raise RequestNotFoundError("no request of this id is in progress", param="request_id")
        return json_reply(200, {"request_id": request.request_id, "aborted": count})

    return WholeRoute(ingress, read=read_abort_request, make=make)
