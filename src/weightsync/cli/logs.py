"""Logging of long-running commands: ``--log-level`` and ``--log-json``. Library users configure ``logging`` as usual."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer


class Level(StrEnum):
    """Lowest severity that is logged."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


LogLevel = Annotated[
    Level,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        help="Lowest severity to log, on standard error: `debug`, `info`, `warning` or `error`.",
    ),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object per line.")]


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``, and ``exception`` if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record, without a line end."""
        record_fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            record_fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(record_fields)


def configure_logs(level: Level, as_json: bool) -> None:
    """Send this process's logs to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("weightsync").setLevel(level.value.upper())
