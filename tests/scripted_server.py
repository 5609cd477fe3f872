"""A real server, `python -m tests.scripted_server MODEL_DIR SCRIPT.json`, over a ScriptedEngine.

SCRIPT.json holds fields of ServerOptions and of Script.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
from pathlib import Path

from deltaserve.engine.core_process import EngineProcess
from deltaserve.server.lifecycle import run_server
from deltaserve.server.listen import listen
from deltaserve.server.logs import set_up_logging
from deltaserve.server.options import ServerOptions

from .scripted_engine import Script, build_scripted_engine


def main(model_path: str, script_path: str) -> int:
    settings = json.loads(Path(script_path).read_text())
    names = {field.name for field in dataclasses.fields(ServerOptions)}
    options = ServerOptions(
        **{
            "model_path": model_path,
            "served_names": ("scripted", "org/alias"),
            "port": 0,
            "max_body_bytes": 100_000,
            **{name: _tuple(settings.pop(name)) for name in names & set(settings)},
        }
    )
    set_up_logging(logging.INFO, options.log_format)
    process = EngineProcess(
        Script(**settings),
        build_scripted_engine,
        Path(script_path).parent,
        functools.partial(set_up_logging, logging.INFO, options.log_format, "engine"),
    )
    return run_server(options, process, listen(options))


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
