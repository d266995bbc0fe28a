"""Options of several commands, declared once so that their names and help agree."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from weightsync.config import ClientSettings, Secret


Pausing = Literal["abort", "wait", "keep"]
"""What a pause does to running requests: :data:`weightsync.model.PauseMode`, whose package imports numpy."""


def setting(variable: str, text: str, default: str | None, metavar: str | None = None, *names: str) -> Any:  # noqa: ANN401
    """An option of a setting. Without it the variable ``WEIGHTSYNC_<variable>`` counts, and without this the ``default``."""
    otherwise = "" if default is None else f"; default{':' if ' ' in default else ''} {default}"  # a value, or words
    return typer.Option(*names, metavar=metavar, help=f"{text} [env: WEIGHTSYNC_{variable}{otherwise}].")


_URL = setting("COORDINATOR", "URL of the coordinator", "http://127.0.0.1:7400", "URL", "--coordinator", "-c")
Coordinator = Annotated[str | None, _URL]
CaFile = Annotated[Path | None, setting("CA_FILE", "CA certificates for an https coordinator", None, "PATH")]


def _token_file(option: str, what: str, variable: str, without: str) -> Any:  # noqa: ANN401 - as typer.Option
    text = f"File with {what} [env: {variable}_FILE, or the token itself in {variable}]. {without}"
    return typer.Option(option, metavar="PATH", help=text)


_OF_TOKEN = ("--token-file", "the token", "WEIGHTSYNC_TOKEN")
_OF_OPERATOR = ("--operator-token-file", "the operator's token", "WEIGHTSYNC_OPERATOR_TOKEN")
_NOT_NEEDED = "Not needed for your own coordinator on this machine."
TokenFile = Annotated[Path | None, _token_file(*_OF_TOKEN, _NOT_NEEDED)]
OperatorTokenFile = Annotated[Path | None, _token_file(*_OF_OPERATOR, _NOT_NEEDED)]
ServedTokenFile = Annotated[
    Path | None,
    _token_file(
        *_OF_TOKEN, "Every trainer, engine and command needs this token. Without it, a coordinator on loopback generates one, "
        "which your other processes on this machine find.",
    ),
]  # fmt: skip
ServedOperatorTokenFile = Annotated[
    Path | None,
    _token_file(
        *_OF_OPERATOR, "`weightsync update` and `weightsync revoke` need it. Without it, a coordinator on loopback generates one; "
        "beyond loopback both commands are refused.",
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
JsonLast = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]

_MOST = 1 << 60
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMG", 1):
    _UNITS |= {_letter: 1 << 10 * _power, f"{_letter}IB": 1 << 10 * _power, f"{_letter}B": 1000**_power}


def parse_size(text: str) -> int:
    """Parse a number of bytes: ``1GiB``, ``256MiB``, ``1.5GB``, ``4096``.

    Raises:
        typer.BadParameter: The text is not a size.
    """
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        nbytes = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a size; write it as 256MiB or 1GiB") from None
    if not 1 <= nbytes < _MOST:
        raise typer.BadParameter(f"{text!r} is not a usable size; it must be at least 1 byte and below 2**60")
    return nbytes


def token_in(path: Path | None, option: str = "--token-file") -> Secret | None:
    """Read the token from the file given by an option.

    Raises:
        ConfigurationError: The file holds no token.
    """
    from weightsync.config import read_token

    return None if path is None else read_token(str(path), f"{option} ")


def operator_in(path: Path | None, settings: ClientSettings) -> Secret:
    """Read the operator's token from the file given by ``--operator-token-file``, otherwise find it for these settings.

    Raises:
        AuthenticationError: This process has none.
        ConfigurationError: The file holds no token.
    """
    from weightsync.protocol.tokens import operator_secret

    return token_in(path, "--operator-token-file") or operator_secret(settings)


def client_settings(coordinator: str | None, token_file: Path | None, ca_file: Path | None) -> ClientSettings:
    """Load the client settings from options and environment.

    Raises:
        ConfigurationError: A setting is wrong.
    """
    from weightsync.config import ClientSettings

    return ClientSettings.load(coordinator=coordinator, token=token_in(token_file), ca_file=ca_file)


Level = Literal["debug", "info", "warning", "error"]
"""Lowest severity that is logged."""
LogLevel = Annotated[Level, typer.Option(help="Lowest severity to log, on standard error.")]
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
    logging.getLogger("weightsync").setLevel(level.upper())
