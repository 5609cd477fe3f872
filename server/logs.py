"""How log lines look: text or JSON, each with the id of the request it belongs to.

The id is the context's, so that lines from anywhere below a request have it. Prompts and answers
are nobody's to log above debug.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from typing import Literal

request_id_of_context: contextvars.ContextVar[str] = contextvars.ContextVar("request_id")


def set_up_logging(level: int, form: Literal["text", "json"], process: str = "") -> None:
    """For the whole process, to stderr. `process` names it in each line if it is not the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if form == "json" else _TextFormatter(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        name = f"{process}: " if process else ""
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # a loading bar, which is drawn again
        super().__init__(f"{clear}%(asctime)s %(levelname)s {name}%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = request_id_of_context.get(None)
        return line if request_id is None else f"{line} id={request_id}"


class _JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message and what `extra={"fields": ...}` adds."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            entry["process"] = self._process
        request_id = request_id_of_context.get(None)
        if request_id is not None:
            entry["request_id"] = request_id
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)
