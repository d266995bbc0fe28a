"""Network checks of ``weightsync doctor``: the coordinator, and the address where a trainer would serve its shards."""

from __future__ import annotations

import msgspec

from weightsync.cli.findings import Finding
from weightsync.config import ClientSettings, Timeouts
from weightsync.errors import AuthenticationError, CoordinatorUnreachable, DeadlineExceeded, TransportUnavailable
from weightsync.protocol.tokens import is_loopback
from weightsync.server.client import Client
from weightsync.transports.hostinfo import own_address, reachable_address

__all__ = ["ask_coordinator", "look_at_data_interface"]

_SECONDS = 3.0


def ask_coordinator(name: str, settings: ClientSettings) -> Finding:
    """Check whether a coordinator answers and accepts this process's token."""
    where = settings.coordinator
    try:
        with Client(msgspec.structs.replace(settings, timeouts=Timeouts(connect=_SECONDS))) as client:
            status = client.status()
    except AuthenticationError as error:
        return Finding(name, "limited", f"{where} answers but rejects the token: {error}", "this process cannot join it")
    except (CoordinatorUnreachable, DeadlineExceeded):
        return Finding(
            name, "missing", f"no coordinator answers at {where}",
            "start one with `weightsync serve`, or give its URL: --coordinator or WEIGHTSYNC_COORDINATOR",
        )  # fmt: skip
    members = f"trainer ranks: {len(status.trainer)}, replicas: {len(status.replicas)}"
    return Finding(name, "ok", f"run {status.run} at {where}: the token is accepted; {members}")


def look_at_data_interface(name: str, settings: ClientSettings) -> Finding:
    """Find the address at which a trainer rank of this machine would serve its shards over TCP, as the trainer does."""
    where = settings.coordinator
    try:
        if settings.data_host is not None:
            return Finding(name, "ok", f"{own_address(settings.data_host)} (WEIGHTSYNC_DATA_HOST={settings.data_host})")
        if is_loopback(where.host):
            return Finding(
                name, "ok", "127.0.0.1, because the coordinator is on loopback: reachable by engines of this machine only. For "
                "other engines set WEIGHTSYNC_DATA_HOST to an interface or address",
            )  # fmt: skip
        address = reachable_address(where.host, where.port)
    except TransportUnavailable as error:
        return Finding(name, "missing", str(error), "a trainer here cannot serve engines over TCP: set WEIGHTSYNC_DATA_HOST")
    return Finding(name, "ok", f"{address}, which has the route to {where.host}; WEIGHTSYNC_DATA_HOST selects another")
