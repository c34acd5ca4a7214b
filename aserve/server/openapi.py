"""``/openapi.json``: what this server takes and answers, generated from the models that check requests.

Says as much as JSON Schema can; rules between fields (``top_logprobs`` needs ``logprobs``) are in the reference only.
Knows the wire models, nothing of engines. Called by ``admin``, which keeps what was built.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from aserve.server.chat_schema import ChatRequest
from aserve.server.completion_schema import MAX_SEQUENCES, CompletionRequest
from aserve.server.offered import NOT_OFFERED, WITHOUT_EFFECT
from aserve.server.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from aserve.server.text_schema import AbortRequest, DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]

_GENERATION_STATUSES = (400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 500, 503, 504)
_SMALL_STATUSES = (401, 403, 503)
_MEANINGS = {
    400: "The request is malformed, or asks for what this server does not have.",
    401: "No API key, or a wrong one.",
    403: "The Host header names no host of this server.",
    404: "There is no such model, or no such request.",
    405: "The route takes other methods.",
    408: "The request did not arrive in time.",
    409: "The request was ended by another one, through its id.",
    413: "The request is too large.",
    415: "The request is not JSON.",
    429: "The API key has as many requests in progress as it may have.",
    500: "A fault of the server.",
    503: "The server is loading, full, ending or broken.",
    504: "A time limit of the request has passed.",
}
_HEADERS = {
    "X-Request-Id": {"type": "string", "description": "Repeated in the answer and in the log."},
    "X-Request-Timeout": {"type": "number", "exclusiveMinimum": 0, "description": "Seconds for the whole request."},
    "X-Queue-Timeout": {"type": "number", "exclusiveMinimum": 0, "description": "Seconds until it begins to run."},
    "X-Idle-Timeout": {"type": "number", "exclusiveMinimum": 0, "description": "Seconds between two tokens."},
}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}


def document(version: str, models: tuple[str, ...] = ()) -> bytes:
    """The whole document as JSON; ``models`` are the served names, none while the model loads."""
    components: dict[str, Schema] = {"Error": _ERROR}
    paths: Schema = {
        "/v1/chat/completions": {
            "post": _generation("Answer a conversation", ChatRequest, "chat.completion", components)
        },
        "/v1/completions": {"post": _generation("Continue texts", CompletionRequest, "text_completion", components)},
    }
    paths |= {path: {"post": _whole(*route, components)} for path, route in _WHOLE.items()}
    paths |= {path: {"get": _small(*answer)} for path, answer in _SMALL.items()}
    paths |= {path: {"get": _probe(summary)} for path, summary in _PROBES.items()}
    paths["/docs"] = {"get": _page("This document as a page to browse")}
    if models:
        names: Schema = {"type": "string", "enum": list(models)}
        paths["/v1/models/{model}"]["get"]["parameters"][0]["schema"] = names
        for request in (ChatRequest, CompletionRequest, *(model for _, model, _ in _WHOLE.values())):
            if "model" in request.model_fields:
                optional = not request.model_fields["model"].is_required()
                components[request.__name__]["properties"]["model"] = (
                    {"anyOf": [names, {"type": "null"}]} if optional else names
                )
    return json.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "aserve", "version": version},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    ).encode()  # not orjson: the limits of a seed have more than 64 bits


def _generation(summary: str, model: type[BaseModel], answer: str, components: dict[str, Schema]) -> Schema:
    schema = _own_schema(model, components)
    components[model.__name__] = _with_other_fields(schema, model)
    whole = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {"object": {"const": answer}, "choices": {"type": "array"}, "usage": {"type": "object"}},
    }
    content = {"application/json": {"schema": whole}, "text/event-stream": {}}
    return _post(summary, model, content, _GENERATION_STATUSES)


def _whole(summary: str, model: type[BaseModel], keys: tuple[str, ...], components: dict[str, Schema]) -> Schema:
    """A POST route that is answered in one piece, by an object with these keys."""
    components[model.__name__] = _own_schema(model, components)
    content = {"application/json": {"schema": {"type": "object", "required": list(keys)}}}
    return _post(summary, model, content, _GENERATION_STATUSES)


def _own_schema(model: type[BaseModel], components: dict[str, Schema]) -> Schema:
    schema = model.model_json_schema(mode="validation", ref_template="#/components/schemas/{model}")
    components.update(schema.pop("$defs", {}))
    return schema


def _post(summary: str, model: type[BaseModel], content: Schema, statuses: tuple[int, ...]) -> Schema:
    name = model.__name__
    return {
        "summary": summary,
        "parameters": [
            {"name": header, "in": "header", "required": False, "schema": schema} for header, schema in _HEADERS.items()
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
        },
        "responses": {"200": {"description": summary, "content": content}, **_errors(statuses)},
    }


def _with_other_fields(schema: Schema, model: type[BaseModel]) -> Schema:
    """Add the fields that are taken where they ask for nothing, and those without effect."""
    known = schema["properties"]
    others: Schema = {name: {"enum": [None, *neutral]} for name, neutral in NOT_OFFERED.items() if name not in known}
    others |= {name: {} for name in sorted(WITHOUT_EFFECT - set(known))}
    if model is CompletionRequest:
        others["best_of"] = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_SEQUENCES}, {"type": "null"}]}
    return {**schema, "properties": {**known, **others}}


def _small(summary: str, content_type: str, schema: Schema) -> Schema:
    parameters = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    one = "one of" in summary
    return {
        "summary": summary,
        **({"parameters": parameters} if one else {}),
        "responses": {
            "200": {"description": summary, "content": {content_type: {"schema": schema}}},
            **_errors((*_SMALL_STATUSES, 404) if one else _SMALL_STATUSES),
        },
    }


def _probe(summary: str) -> Schema:
    """Open to everybody: neither a key nor a host is asked for."""
    content = {"application/json": {"schema": _HEALTH}}
    answers = {
        "200": {"description": summary, "content": content},
        "503": {"description": "No; why not.", "content": content},
    }
    return {"summary": summary, "security": [], "responses": answers}


def _page(summary: str) -> Schema:
    """Open to everybody, as probes are."""
    content = {"text/html": {"schema": {"type": "string"}}}
    return {"summary": summary, "security": [], "responses": {"200": {"description": summary, "content": content}}}


def _errors(statuses: tuple[int, ...]) -> Schema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": _MEANINGS[status], "content": content} for status in sorted(statuses)}


_WHOLE: dict[str, tuple[str, type[BaseModel], tuple[str, ...]]] = {
    "/v1/embeddings": ("Vectors of texts", EmbeddingRequest, ("object", "data", "model", "usage")),
    "/v1/score": ("How well pairs of texts go together", ScoreRequest, ("id", "object", "data", "model", "usage")),
    "/v1/rerank": ("Documents by how well they go with a query", RerankRequest, ("id", "model", "results", "usage")),
    "/tokenize": ("Token ids of a text or a conversation", TokenizeRequest, ("count", "max_model_len", "tokens")),
    "/detokenize": ("The text of token ids", DetokenizeRequest, ("prompt",)),
    "/abort": ("End a request that is in progress", AbortRequest, ("request_id", "aborted")),
}
_OBJECT: Schema = {"type": "object"}
_HEALTH: Schema = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}, "reason": {"type": "string"}},
}
_PROBES = {"/health": "Whether the engine runs", "/ready": "Whether new requests should be sent here"}
_SMALL: dict[str, tuple[str, str, Schema]] = {
    "/v1/models": ("The served names", "application/json", _OBJECT),
    "/v1/models/{model}": ("The facts of one of the served names", "application/json", _OBJECT),
    "/metrics": ("Numbers in the text form of Prometheus", "text/plain", {"type": "string"}),
    "/version": ("The version", "application/json", _OBJECT),
    "/openapi.json": ("This document", "application/json", _OBJECT),
}
