"""``weightsync token``: the token of a coordinator, its source, and a link that opens the status page with it."""

from __future__ import annotations

import msgspec
import typer

from weightsync.config import ClientSettings, token_source
from weightsync.errors import AuthenticationError
from weightsync.protocol.tokens import find_token, is_loopback, login_url, token_path

__all__ = ["FoundToken", "find", "show_token"]


class FoundToken(msgspec.Struct, frozen=True):
    """Token that this process would present to a coordinator."""

    token: str
    source: str
    """Option, variable or file that holds it."""
    page: str
    """Link to the status page that logs in."""


def find(settings: ClientSettings, option: str | None) -> FoundToken:
    """Find the token for ``settings.coordinator``.

    Args:
        settings: The client settings.
        option: File given by ``--token-file``, if any.

    Raises:
        AuthenticationError: There is no token.
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
            "to the token with which it was started"
        )
    return (
        f"no token for the coordinator at {where}: {token_path(where.port)} does not exist. Check that `weightsync serve` runs at "
        "this port as this user. If it was started with WEIGHTSYNC_TOKEN, which writes no file, set that variable here too"
    )


def show_token(settings: ClientSettings, option: str | None, *, part: str | None, as_json: bool) -> None:
    """Print the token, its source and the link, or only ``part``, the name of a field of :class:`FoundToken`."""
    located = find(settings, option)
    if as_json:
        typer.echo(msgspec.json.encode(located).decode())
    elif part is not None:
        typer.echo(getattr(located, part))
    else:
        typer.echo(f"token  {located.token}\nfrom   {located.source}\npage   {located.page}")
