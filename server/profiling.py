"""POST /start_profile and /stop_profile, for a profiler that was attached to the engine's process:
`nsys profile --capture-range=cudaProfilerApi deltaserve serve --enable-profiling ...`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from deltaserve.engine.engine_request import EngineUnavailable

from .errors import ApiError, JsonResponse
from .state import ServerState


async def start_profile(request: Request) -> Response:
    return await _set_profiling(request, True)


async def stop_profile(request: Request) -> Response:
    return await _set_profiling(request, False)


async def _set_profiling(request: Request, on: bool) -> Response:
    """200 once steps are, or are no longer, recorded."""
    state: ServerState = request.app.state.server
    if state.engine.facts is None:
        raise ApiError(503, state.unavailable or "", headers={"Retry-After": "1"})
    if state.engine.facts.device_name == "cpu":
        raise ApiError(400, "there is no GPU to profile: the engine runs on the CPU")
    try:
        await state.engine.set_profiling(on)
    except EngineUnavailable as error:
        raise ApiError(503, str(error)) from None
    return JsonResponse({"profiling": on})
