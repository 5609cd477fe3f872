"""GET /openapi.json: every route with its bodies and all statuses it answers with.

Request and response schemas are those of the modules that parse and write them.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .auth import OPEN_PATHS
from .chat_protocol import chat_schemas
from .errors import ERROR_TYPES, JsonResponse
from .options import ServerOptions
from .protocol import completion_schemas
from .state import ServerState
from .tokenize import tokenizer_schemas
from .version import version

_STATUSES = {
    400: "The request is not a valid one; the message says what to change",
    401: "No API key, or not a valid one",
    404: "There is no such model",
    408: "The request did not come in time",
    413: "The body is larger than the server takes",
    415: "The body is not application/json",
    429: "As many requests wait as may",
    431: "The headers are larger than the server takes",
    500: "Internal error; the log has more under the request id of the message",
    503: "The model is loading, the server is draining, the request took too long or the engine "
    "is dead; the message says which",
}
_ANY = (400, 408, 431, 500)  # of whatever is sent to whatever route
_BODY = (413, 415)
_RETRY = {429, 503}

_STRING = {"type": "string"}
_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "max_model_len"],
    "properties": {
        "id": _STRING,
        "object": {"const": "model"},
        "created": {"type": "integer", "description": "seconds since the epoch"},
        "owned_by": _STRING,
        "max_model_len": {"type": "integer", "description": "tokens of prompt and answer"},
    },
    "additionalProperties": False,
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _STRING,
                "type": {"enum": sorted({"invalid_request_error", *ERROR_TYPES.values()})},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": ["string", "null"]},
            },
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}
_SCHEMAS: dict[str, Any] = {
    "Error": _ERROR,
    "Model": _MODEL,
    "ModelList": {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        },
        "additionalProperties": False,
    },
    "TokenizerInfo": {
        "type": "object",
        "required": ["tokenizer_class"],
        "properties": {"tokenizer_class": _STRING},
        "description": "tokenizer_config.json, and the chat template",
    },
    "Status": {
        "type": "object",
        "required": ["status"],
        "properties": {"status": _STRING},
        "additionalProperties": False,
    },
    "Version": {
        "type": "object",
        "required": ["version"],
        "properties": {"version": _STRING},
        "additionalProperties": False,
    },
    "Profiling": {
        "type": "object",
        "required": ["profiling"],
        "properties": {"profiling": {"type": "boolean"}},
        "additionalProperties": False,
    },
}


async def openapi(request: Request) -> Response:
    state: ServerState = request.app.state.server
    return JsonResponse(describe(state.options))


def describe(options: ServerOptions) -> dict[str, Any]:
    """The document for a server with these options."""
    paths: dict[str, Any] = {
        "/v1/completions": {
            "post": _operation(
                "Complete a prompt", "Completion", (404, 429, 503), body="CompletionBody"
            )
        },
        "/v1/chat/completions": {
            "post": _operation("Answer a chat", "ChatCompletion", (404, 429, 503), body="ChatBody")
        },
        "/v1/models": {"get": _operation("The served names", "ModelList", (503,))},
        "/v1/models/{id}": {
            "get": _operation("One served name", "Model", (404, 503)),
            "parameters": [
                {
                    "name": "id",
                    "in": "path",
                    "required": True,
                    "schema": _STRING,
                    "examples": {name: {"value": name} for name in options.served_names},
                    "description": "may hold slashes",
                }
            ],
        },
        "/tokenize": {
            "post": _operation("Text to token ids", "Tokenized", (404, 503), body="TokenizeBody")
        },
        "/detokenize": {
            "post": _operation(
                "Token ids to text", "Detokenized", (404, 503), body="DetokenizeBody"
            )
        },
        "/tokenizer_info": {"get": _operation("Its configuration", "TokenizerInfo", (503,))},
        "/health": {"get": _operation("Whether the engine lives", "Status", (503,))},
        "/ready": {"get": _operation("Whether it answers", "Status", (503,))},
        "/version": {"get": _operation("Of the server", "Version", ())},
        "/metrics": {"get": _operation("For Prometheus", None, (503,))},
        "/openapi.json": {"get": _operation("This document", {"type": "object"}, ())},
    }
    if options.enable_profiling:
        for path in ("/start_profile", "/stop_profile"):
            summary = f"{path[1:].partition('_')[0].capitalize()} what a profiler records"
            paths[path] = {"post": _operation(summary, "Profiling", (503,))}
    for path, chunk in (("/v1/completions", "Completion"), ("/v1/chat/completions", "ChatChunk")):
        paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"] = {
            "schema": _events(chunk)
        }
    schemas = {**_SCHEMAS, **completion_schemas(), **chat_schemas(), **tokenizer_schemas()}
    for body in ("CompletionBody", "ChatBody"):
        schemas[body]["properties"]["model"] = {"enum": [*options.served_names]}
    for body in ("TokenizeBody", "DetokenizeBody"):
        schemas[body]["properties"]["model"] = {"enum": [*options.served_names, None]}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "deltaserve", "version": version()},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if options.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in paths.keys() - OPEN_PATHS:
            for method in paths[path].keys() & {"get", "post"}:
                paths[path][method]["security"] = [{"key": []}]
                paths[path][method]["responses"]["401"] = _error(401)
    return document


def _operation(
    summary: str,
    schema: str | dict[str, Any] | None,
    statuses: tuple[int, ...],
    *,
    body: str | None = None,
) -> dict[str, Any]:
    """`schema` of the answer: its name, itself, or None for plain text; `body` of the request."""
    kind = "application/json"
    if schema is None:
        kind, schema = "text/plain", _STRING
    elif isinstance(schema, str):
        schema = _ref(schema)
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done", "content": {kind: {"schema": schema}}},
            **{
                str(status): _error(status)
                for status in sorted({*_ANY, *statuses, *(_BODY if body else ())})
            },
        },
    }
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(body)}},
        }
    return operation


def _events(chunk: str) -> dict[str, Any]:
    """Of a stream: each event's data."""
    content = {"anyOf": [_ref(chunk), _ref("Error")]}
    chunk_text = {"contentMediaType": "application/json", "contentSchema": content}
    return {
        "type": "object",
        "description": "With stream: one event after another",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, chunk_text]}},
    }


def _error(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": _STATUSES[status],
        "content": {"application/json": {"schema": _ref("Error")}},
    }
    if status in _RETRY:
        response["headers"] = {
            "Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}
        }
    return response


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
