"""The Starlette application: which path answers what, and the small routes themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .access_log import RequestLog
from .auth import ApiKeys
from .chat import chat_completions
from .completions import completions
from .cors import Cors
from .errors import ApiError, JsonResponse
from .metrics import metrics
from .openapi import openapi
from .profiling import start_profile, stop_profile
from .state import ServerState
from .tokenize import detokenize, tokenize, tokenizer_info
from .version import version

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(state: ServerState) -> Starlette:
    """An application over a started engine; the caller loads, drains and closes the engine."""
    options = state.options
    middleware = [Middleware(RequestLog)]
    if options.cors_origins:
        middleware.append(Middleware(Cors, origins=options.cors_origins))
    if options.api_keys:
        middleware.append(Middleware(ApiKeys, keys=options.api_keys))
    profiling = [
        Route("/start_profile", start_profile, methods=["POST"]),
        Route("/stop_profile", stop_profile, methods=["POST"]),
    ]
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/tokenizer_info", tokenizer_info),
            Route("/v1/models", list_models),
            Route("/v1/models/{id:path}", get_model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", get_version),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
            *(profiling if options.enable_profiling else ()),
        ],
        middleware=middleware,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


async def health(request: Request) -> Response:
    """200 while the engine is alive, loading included."""
    broken = _state(request).engine.broken
    if broken is not None:
        raise ApiError(503, broken)
    return JsonResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 when a completion would be accepted by any worker; else 503 with what it waits for."""
    not_ready = _state(request).not_ready
    if not_ready is not None:
        raise ApiError(503, not_ready, headers={"Retry-After": "1"})
    return JsonResponse({"status": "ready"})


async def get_version(request: Request) -> Response:
    return JsonResponse({"version": version()})


async def list_models(request: Request) -> Response:
    state = _state(request)
    return JsonResponse(
        {"object": "list", "data": [_model(state, name) for name in state.served_names]}
    )


async def get_model(request: Request) -> Response:
    state = _state(request)
    name = request.path_params["id"]
    if name not in state.served_names:
        raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")
    return JsonResponse(_model(state, name))


def _model(state: ServerState, name: str) -> dict[str, object]:
    facts = state.engine.facts
    if facts is None:
        raise ApiError(503, state.unavailable or "", headers={"Retry-After": "1"})
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "deltaserve",
        "max_model_len": facts.capacity.max_model_len,
    }


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"no such route: {request.url.path}",
        405: f"{request.method} is not allowed for {request.url.path}",
    }
    message = messages.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()
