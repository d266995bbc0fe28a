"""``weightsync status``, ``update`` and ``revoke``: queries and requests to a coordinator."""

from __future__ import annotations

import time

import msgspec
import typer
from rich.console import Console

from weightsync.cli.tables import event_line, plain_text, round_view, show, status_view
from weightsync.config import ClientSettings, Secret
from weightsync.coordinator.events import Audited, ReplicaBytes
from weightsync.server.client import Client


def show_status(settings: ClientSettings, *, as_json: bool, watch: bool) -> None:
    """Print the status once. With ``watch``, then print every event until the coordinator or the user ends it."""
    with Client(settings) as client:
        if not watch:
            show(client.status(), status_view, as_json=as_json)
            return
        with client.events() as events:  # subscribed before the status is read, so that no event is missed
            show(client.status(), status_view, as_json=as_json)
            for event in events:
                if as_json:
                    typer.echo(msgspec.json.encode(event).decode())
                elif not isinstance(event, ReplicaBytes) and not (isinstance(event, Audited) and event.error is None):
                    Console().print(f"{time.strftime('%H:%M:%S')}  {event_line(event)}", markup=False, highlight=False)


def seed(settings: ClientSettings, operator: Secret, replicas: tuple[str, ...], timeout: float | None, *, as_json: bool) -> bool:
    """Start a round and print its result. Returns whether it succeeded."""
    with Client(settings, operator) as client:
        result = client.start_round(replicas or None, timeout)
    show(result, round_view, as_json=as_json)
    return result.ok


def send_away(settings: ClientSettings, operator: Secret, member: str, *, as_json: bool) -> None:
    """Revoke a rank's credential and print which process held it."""
    with Client(settings, operator) as client:
        revoked = client.revoke(member)
    line = f"revoked {revoked.member}: disconnected process {revoked.pid} on {revoked.host}"
    show(revoked, lambda _: plain_text(line), as_json=as_json)
