"""How the HTTP process logs: lines for people or one JSON object a line. No prompt and no answer is ever logged."""

from __future__ import annotations

import logging
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


def set_up(log_format: str) -> None:
    """Log to stderr. A log that cannot be written (a full disk) costs the line and nothing else."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
