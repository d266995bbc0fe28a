"""Options that several commands have: declared once, so that they are spelled and explained alike."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weightsync.config import ClientSettings, Secret

__all__ = ["CaFile", "Coordinator", "Json", "JsonLast", "Pausing", "TokenFile", "client_settings", "parse_size", "token_in"]


class Pausing(StrEnum):
    """What a pause does to running requests."""

    abort = "abort"
    wait = "wait"
    keep = "keep"


Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        "-c",
        metavar="URL",
        help="Where the coordinator answers [env: WEIGHTSYNC_COORDINATOR; default http://127.0.0.1:7400].",
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option("--ca-file", metavar="PATH", help="Certificates to check an https coordinator against [env: WEIGHTSYNC_CA_FILE]."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="PATH",
        help="File with the token [env: WEIGHTSYNC_TOKEN_FILE, or the token itself in WEIGHTSYNC_TOKEN]. "
        "Not needed for a coordinator of your own on this machine.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
JsonLast = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")]

_MOST = 1 << 60
_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KIB": 1 << 10,
    "KB": 1000,
    "M": 1 << 20,
    "MIB": 1 << 20,
    "MB": 10**6,
    "G": 1 << 30,
    "GIB": 1 << 30,
    "GB": 10**9,
}


def parse_size(text: str) -> int:
    """Bytes in ``text``: ``1GiB``, ``256MiB``, ``1.5GB``, ``4096``. Raises :class:`typer.BadParameter`."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        nbytes = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a size; write it as 256MiB or 1GiB") from None
    if not 1 <= nbytes < _MOST:
        raise typer.BadParameter(f"{text!r} is not a size that anything has")
    return nbytes


def token_in(path: Path | None) -> Secret | None:
    """The token in the file that ``--token-file`` names. Raises :class:`~weightsync.errors.ConfigurationError`."""
    from weightsync.config import read_token

    return None if path is None else read_token(str(path), "--token-file ")


def client_settings(coordinator: str | None, token_file: Path | None, ca_file: Path | None) -> ClientSettings:
    """How to reach the coordinator, by options and environment. Raises :class:`~weightsync.errors.ConfigurationError`."""
    from weightsync.config import ClientSettings

    return ClientSettings.load(coordinator=coordinator, token=token_in(token_file), ca_file=ca_file)
