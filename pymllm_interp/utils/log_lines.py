"""The log of a server's processes: a line a record, as JSON or as text."""

from __future__ import annotations

import json
import logging
import sys
import threading
from contextvars import ContextVar
from types import TracebackType
from typing import Any

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that the code works for."""


class JsonLines(logging.Formatter):
    """Log records as one JSON object a line.

    Args:
        process: name of the process: http, engine, or a replica's.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, Any] = {
            "time": round(record.created, 3), "level": record.levelname.lower(), "process": self._process,
            "logger": record.name,
        }  # fmt: skip
        if current := request_id.get():
            entry["request_id"] = current
        entry |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_handler(form: str, process: str) -> logging.Handler:
    """A handler that writes to standard error, as text or as JSON lines.

    Args:
        form: "json" or "text".
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")
    handler.setFormatter(JsonLines(process) if form == "json" else text)
    return handler


def log_to_stderr(form: str, level: str, process: str) -> None:
    """Log all records of this process, its warnings and its threads' errors. For the whole life of the process."""
    logging.basicConfig(level=level.upper(), handlers=[log_handler(form, process)], force=True)
    logging.captureWarnings(True)

    def raised(kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
        if error is not None and not issubclass(kind, SystemExit):
            logging.getLogger(__name__).critical("%s", error, exc_info=(kind, error, where))

    sys.excepthook = raised
    threading.excepthook = lambda found: raised(found.exc_type, found.exc_value, found.exc_traceback)
