"""POST /start_profile and /stop_profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .server_process import ServerProcess, start_scripted, wait_until


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    started = start_scripted(tmp_path, **request.param).wait_ready()
    yield started
    started.stop()


@pytest.mark.parametrize(
    "server", [{"enable_profiling": True, "device_name": "cuda"}], indirect=True
)
def test_the_engine_is_told(server: ServerProcess) -> None:
    for path, on in (("/start_profile", True), ("/stop_profile", False)):
        response = server.client.post(path)
        assert (response.status_code, response.json()) == (200, {"profiling": on})
        # the answer comes after the engine has done it; its log takes a way of its own
        wait_until(f"profiling {on}", lambda on=on: f"profiling {on}" in server.log())
    assert server.client.get("/start_profile").status_code == 405


@pytest.mark.parametrize("server", [{"device_name": "cuda"}], indirect=True)
def test_without_the_flag_there_is_no_such_route(server: ServerProcess) -> None:
    assert server.client.post("/start_profile").status_code == 404
    assert "profiling" not in server.log()


@pytest.mark.parametrize("server", [{"enable_profiling": True}], indirect=True)
def test_on_the_cpu_it_is_refused(server: ServerProcess) -> None:
    response = server.client.post("/start_profile")
    assert response.status_code == 400 and "CPU" in response.json()["error"]["message"]
