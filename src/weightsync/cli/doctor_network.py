"""Network check of ``weightsync doctor``: the address where a trainer would serve its shards."""

from __future__ import annotations

from weightsync.config import ClientSettings
from weightsync.errors import TransportUnavailable
from weightsync.protocol.tokens import is_loopback
from weightsync.server.findings import Finding
from weightsync.transports.hostinfo import own_address, reachable_address

__all__ = ["look_at_data_interface"]


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
