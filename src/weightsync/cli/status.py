"""``weightsync status``, ``replicas``, ``update`` and ``revoke``: queries and requests to a coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import typer
from rich.console import Console, Group

from weightsync.cli.tables import adapters_view, event_line, plain_text, round_view, show, status_view, titled_table
from weightsync.config import ClientSettings, Secret
from weightsync.coordinator.events import Audited, ReplicaBytes
from weightsync.coordinator.status import ReplicaStatus, Status
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, DeadlineExceeded
from weightsync.model import FIRST_EPOCH, in_words, label_of, parse_label
from weightsync.server.client import Client
from weightsync.server.watch import Watch


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


def list_replicas(settings: ClientSettings, *, as_json: bool) -> None:
    """Print which version each replica serves."""
    with Client(settings) as client:
        _show(client.status(), as_json=as_json)


def wait_until_served(settings: ClientSettings, label: str, count: int | None, seconds: float, *, as_json: bool) -> None:
    """Print the replicas once ``count`` of them, by default all, serve the version ``label`` or a later one.

    Raises:
        ConfigurationError: ``label`` is no version of the coordinator's run.
        DeadlineExceeded: ``seconds`` have passed. The message says what each of the others does.
        CoordinatorUnreachable: There was no coordinator in this time.
    """
    wanted = parse_label(label)
    if wanted is None or wanted[0] is None:
        raise ConfigurationError(f"{label!r} is no version: write it as run@7")
    _show(asyncio.run(_served(settings, label, (wanted[0], wanted[1:]), count, seconds)), as_json=as_json)


async def _served(
    settings: ClientSettings, label: str, wanted: tuple[str, tuple[int, int]], count: int | None, seconds: float
) -> Status:
    run, order = wanted
    served: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    seen: list[Status] = []

    def look(status: Status) -> None:
        seen[:] = [status]
        if served.done():
            return
        if status.run != run:
            served.set_exception(ConfigurationError(f"{label} is of run {run}, and this coordinator's run is {status.run}"))
        elif len(_serving(status, order)) >= (max(1, len(_known(status))) if count is None else count):
            served.set_result(status)

    deadline = Deadline(seconds)
    watch = Watch(settings, look, lambda name: None)
    try:
        await watch.started(seconds)
        either: list[asyncio.Future[Any]] = [served, watch.ended]
        await asyncio.wait(either, timeout=deadline.left, return_when=asyncio.FIRST_COMPLETED)
        if served.done():
            return served.result()
        if watch.ended.done():
            watch.ended.result()
    finally:
        await watch.aclose()
    serving, known = _serving(seen[0], order), _known(seen[0])
    others = "; ".join(_does(replica) for replica in known if replica not in serving) or "no other replica has joined"
    raise DeadlineExceeded(f"{len(serving)} of {len(known)} replicas serve {label} after {seconds:g} s. The others: {others}")


def _known(status: Status) -> list[ReplicaStatus]:
    return [replica for replica in status.replicas if replica.state != "left"]


def _serving(status: Status, order: tuple[int, int]) -> list[ReplicaStatus]:
    return [
        replica for replica in _known(status)
        if replica.state == "loaded" and replica.version is not None and (replica.epoch or FIRST_EPOCH, replica.version) >= order
    ]  # fmt: skip


def _does(replica: ReplicaStatus) -> str:
    version = "no version" if replica.version is None else f"version {replica.version}"
    return f"{replica.name} is {in_words(replica.state)} with {version}" + (f" ({replica.error})" if replica.error else "")


def _show(status: Status, *, as_json: bool) -> None:
    def view(replicas: Sequence[ReplicaStatus]) -> Group:
        rows = (
            (
                replica.name, in_words(replica.state),
                None if replica.version is None else label_of(status.run, replica.epoch or FIRST_EPOCH, replica.version),
                replica.verified or None, "yes" if replica.routable else "no", replica.url or None,
            )
            for replica in replicas
        )  # fmt: skip
        headings = ("replica", "state", "version", "verified", "gets requests", "~url")
        return Group(titled_table("replicas", headings, rows), *adapters_view(status))

    show(_known(status), view, as_json=as_json)
