"""``weightsync token``: the tokens of a coordinator, their sources, and a link that opens the status page."""

from __future__ import annotations

import msgspec
import typer

from weightsync.config import ClientSettings, Secret, SecretKind, token_source
from weightsync.errors import AuthenticationError
from weightsync.protocol.proof import limited
from weightsync.protocol.tokens import is_loopback, login_url, secret_of, token_path


class FoundToken(msgspec.Struct, frozen=True):
    """Token that this process would present to a coordinator."""

    token: str
    source: str
    """Option, variable or file that holds it."""
    page: str
    """Link to the status page that logs in."""
    operator: str | None = None
    """Operator's token, if this process can find it."""
    operator_source: str | None = None
    metrics: str | None = None
    """Token for the metrics alone, if this process can find it."""
    metrics_source: str | None = None


def find(settings: ClientSettings, option: str | None) -> FoundToken:
    """Find the tokens for ``settings.coordinator``.

    Args:
        settings: The client settings.
        option: File given by ``--token-file``, if any.

    Raises:
        AuthenticationError: There is no token for workers.
    """
    token, source = _held(settings, "token")
    if token is None or source is None:
        raise AuthenticationError(_missing(settings))
    page = login_url(settings.coordinator, Secret(token))
    return FoundToken(token, option or source, page, *_held(settings, "operator"), *_held(settings, "metrics"))


def _held(settings: ClientSettings, kind: SecretKind) -> tuple[str | None, str | None]:
    """The secret of a kind and its source."""
    secret = secret_of(settings, kind)
    if secret is None:
        return None, None
    return secret.reveal(), token_source(kind) or str(token_path(settings.coordinator.port, kind=kind))


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


def show_limited_token(settings: ClientSettings, option: str | None, adapters: str) -> None:
    """Print a token that admits to publishing the adapters whose names match.

    Raises as :func:`find` does, and :class:`~weightsync.errors.ConfigurationError` for names that are no patterns.
    """
    typer.echo(limited(Secret(find(settings, option).token), adapters).reveal())


def show_token(settings: ClientSettings, option: str | None, *, part: str | None, as_json: bool) -> None:
    """Print the tokens, their sources and the link, or only ``part``, the name of a field of :class:`FoundToken`.

    Raises:
        AuthenticationError: This process cannot find the token that is asked for.
    """
    located = find(settings, option)
    if as_json:
        typer.echo(msgspec.json.encode(located).decode())
    elif part is not None:
        if getattr(located, part) is None:
            raise AuthenticationError(f"this process finds no {part} token for the coordinator at {settings.coordinator}")
        typer.echo(getattr(located, part))
    else:
        names = ("token", "from", "page", "operator", "from", "metrics", "from")  # of the fields, in their order
        lines = zip(names, msgspec.structs.astuple(located), strict=True)
        typer.echo("\n".join(f"{name:<8}  {text}" for name, text in lines if text is not None))
