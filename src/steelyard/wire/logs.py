"""How a server's processes log: lines for people or one JSON object a line. No prompt and no answer is ever logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "message", and "exception" where there is one}."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


class Handler(logging.StreamHandler):
    """Writes to stderr. A line that cannot be written (a full disk) is lost, counted, and costs nothing else."""

    on_lost: Callable[[], None] = staticmethod(lambda: None)

    def handleError(self, record: logging.LogRecord) -> None:
        self.on_lost()


def count_lost(on_lost: Callable[[], None]) -> None:
    """Call `on_lost` for every line that cannot be written from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Handler):
            handler.on_lost = on_lost


def set_up(log_format: str, level: int = logging.WARNING) -> None:
    """Log to stderr, from `level` on. As JSON, Python's own warnings are lines of the log too."""
    handler = Handler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.captureWarnings(True)
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
