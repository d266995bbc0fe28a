"""``weightsync token``: the token of a coordinator, where it comes from, and a link that opens the status page with it."""

from __future__ import annotations

import msgspec
import typer

from weightsync.config import ClientSettings, token_source
from weightsync.errors import AuthenticationError
from weightsync.protocol.tokens import find_token, is_loopback, login_url, token_path

__all__ = ["FoundToken", "find", "show_token"]


class FoundToken(msgspec.Struct, frozen=True):
    """A coordinator's token as this process would present it."""

    token: str
    source: str
    """The option, variable or file that it comes from."""
    page: str
    """A link to the status page that logs in."""


def find(settings: ClientSettings, option: str | None) -> FoundToken:
    """The token for ``settings.coordinator``; ``option`` is the file that ``--token-file`` named, if any.

    Raises :class:`~weightsync.errors.AuthenticationError` if there is none.
    """
    token, where = settings.token, settings.coordinator
    if token is None:
        token = find_token(where)
        source = str(token_path(where.port))
    else:
        source = option or token_source() or ""
    if token is None:
        raise AuthenticationError(_missing(settings))
    return FoundToken(token.reveal(), source, login_url(where, token))


def _missing(settings: ClientSettings) -> str:
    where = settings.coordinator
    if not is_loopback(where.host):
        return (
            f"no token for the coordinator at {where}: it is on another machine, so set WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE "
            "to the one that it was started with"
        )
    return (
        f"no token for the coordinator at {where}: none of your processes left one in {token_path(where.port)}. Is `weightsync "
        "serve` running, by this user, at this port? One that was started with WEIGHTSYNC_TOKEN leaves none: set it here too"
    )


def show_token(settings: ClientSettings, option: str | None, *, part: str | None, as_json: bool) -> None:
    """Print the token, its source and the link; or only ``part``, one of the names of :class:`FoundToken`."""
    found = find(settings, option)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    elif part is not None:
        typer.echo(getattr(found, part))
    else:
        typer.echo(f"token  {found.token}\nfrom   {found.source}\npage   {found.page}")
