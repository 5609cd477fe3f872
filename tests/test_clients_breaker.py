"""2,000 hostile requests to a server with a real model, beside streams that must not notice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.break_server import Stream, attack
from tools.hostile_requests import hostile_requests

from .server_process import ServerProcess, wait_until

MODEL = "models/demo"


@pytest.mark.clients
def test_two_thousand_hostile_requests(tmp_path: Path) -> None:
    arguments = ["serve", "--model-path", MODEL, "--device", "cpu", "--port", "0"]
    server = ServerProcess(
        ["deltaserve.server.cli", *arguments, "--max-body-bytes=100000"], tmp_path
    )
    try:
        server.wait_ready()
        quiet = Stream(server.port, MODEL, 400)
        quiet.join()
        streams = [Stream(server.port, MODEL, 400) for _ in range(2)]
        report = attack(server.port, hostile_requests(random.Random(5), MODEL, 2000))
        assert report.complaints == []
        assert report.num_requests == 2000
        for stream in streams:
            stream.join(120)
            assert stream.text == quiet.text
        wait_until("nothing left", server.is_idle)
        assert "Traceback" not in server.log()
    finally:
        server.stop()
