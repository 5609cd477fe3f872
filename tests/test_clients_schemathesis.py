"""schemathesis reads openapi.json and tries everything it says, and what it does not say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .server_process import start_scripted


@pytest.mark.clients
def test_schemathesis_finds_no_5xx_and_nothing_undocumented(tmp_path: Path) -> None:
    """Statuses, content types, headers and bodies are as openapi.json says, and what it calls
    invalid is refused. What it calls valid may be refused all the same: no schema says that
    `stream_options` needs `stream`."""
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ tools }}"
    )
    server = start_scripted(
        tmp_path,
        served_names=["scripted", "org/alias"],
        obedient=False,
        max_running=8,
        max_queue=4096,
        max_model_len=256,
    )
    try:
        server.wait_ready()
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("schemathesis")),
                "run",
                f"{server.url}/openapi.json",
                "--checks=all",
                "--exclude-checks=positive_data_acceptance",
                "--max-examples=40",
                "--seed=1",
                "--no-color",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for status in (200, 400):  # it got as far as the engine
            for path in ("/v1/completions", "/v1/chat/completions"):
                assert f"POST {path} {status} " in server.log()
        assert "Traceback" not in server.log()
    finally:
        server.stop()
