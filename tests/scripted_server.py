"""A real server, `python -m tests.scripted_server MODEL_DIR SCRIPT.json`, over a ScriptedEngine."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from deltaserve.engine.core_process import EngineProcess
from deltaserve.server.lifecycle import ServerOptions, bind, run_server

from .scripted_engine import Script, build_scripted_engine


def main(model_path: str, script_path: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    settings = json.loads(Path(script_path).read_text())
    options = ServerOptions(
        model_path=model_path,
        served_names=("scripted", "org/alias"),
        host="127.0.0.1",
        port=0,
        max_body_bytes=100_000,
        shutdown_timeout=settings.pop("shutdown_timeout", 30.0),
        step_timeout=settings.pop("step_timeout", 30.0),
    )
    process = EngineProcess(
        Script(**settings), build_scripted_engine, crash_dir=Path(script_path).parent
    )
    return run_server(options, process, bind(options.host, options.port))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
