"""``weightsync serve``: runs the coordinator in the foreground and logs every round."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator

import typer

from weightsync.cli.tables import event_line
from weightsync.config import Address, ServerSettings
from weightsync.coordinator.coordinator import Coordinator
from weightsync.coordinator.events import ReplicaEnded, RoundEnded, RoundStarted
from weightsync.protocol.tokens import Secrets, is_loopback, login_url, token_path
from weightsync.server.server import serve

_log = logging.getLogger("weightsync")


def on_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()


def serve_forever(**given: object) -> None:
    """Serve until Ctrl-C or SIGTERM, with settings from the command line (those that are not ``None``) and the environment."""
    settings = ServerSettings.load(**given)
    following: list[asyncio.Task[None]] = []  # asyncio holds tasks only weakly

    def started(address: Address, secrets: Secrets, coordinator: Coordinator) -> None:
        following.append(asyncio.ensure_future(_follow(coordinator)))
        typer.echo(f"coordinator of run {coordinator.settings.run} at {address.url}")
        for what, text in _hints(settings, address, secrets, coordinator.settings.run):
            typer.echo(f"  {what:<12} {text}")

    serve(settings, started)
    typer.echo("coordinator stopped")


def _hints(settings: ServerSettings, address: Address, secrets: Secrets, run: str) -> Iterator[tuple[str, str]]:
    """Lines to print at the start, as pairs of a heading and a text."""
    if is_loopback(settings.host):
        yield "reachable", "from this machine only; for others set a token and --host 0.0.0.0"
    elif address.scheme == "http":
        yield "network", "not encrypted; on an untrusted network give --tls-cert and --tls-key"
    # Print the link on a terminal only, because standard output may be a file that others can read.
    if settings.token is None and on_terminal():
        yield "status page", login_url(address, secrets.token)
    else:
        yield "status page", f"{address.url}/ (it asks for the token; `weightsync token` prints a link with it)"
    if settings.token is None:
        yield "token", f"{token_path(address.port)} (your processes find it)"
    if secrets.operator is None:
        yield "operators", "refused: set WEIGHTSYNC_OPERATOR_TOKEN for `weightsync revoke` and `weightsync update`"
    if not settings.run:
        yield "to restart", f"use --run {run} so that replicas keep their versions"


async def _follow(coordinator: Coordinator) -> None:
    """Log the events of rounds until the coordinator is closed."""
    async for event in coordinator.subscribe():
        if isinstance(event, RoundStarted | ReplicaEnded | RoundEnded):
            _log.log(logging.WARNING if _failed(event) else logging.INFO, "%s", event_line(event))


def _failed(event: RoundStarted | ReplicaEnded | RoundEnded) -> bool:
    if isinstance(event, ReplicaEnded):
        return event.result.error is not None
    return isinstance(event, RoundEnded) and (event.result is None or not event.result.ok)
