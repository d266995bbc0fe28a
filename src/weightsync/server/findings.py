"""Results of checks (``weightsync doctor``, ``python -m weightsync.integrations``), and checks that several of them make."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec

from weightsync.config import ClientSettings, Timeouts
from weightsync.errors import AuthenticationError, CoordinatorUnreachable, DeadlineExceeded
from weightsync.server.client import Client

__all__ = ["Finding", "Status", "ask_coordinator", "find_release"]

_SECONDS = 3.0

Status = Literal["ok", "limited", "missing", "unknown"]


class Finding(msgspec.Struct, frozen=True):
    """Result of one check: what was found, and its impact if the status is not ``ok``."""

    name: str
    status: Status
    value: str
    cost: str = ""


def find_release(package: str, title: str, tried: str, was_tried: Callable[[str], bool]) -> Finding:
    """Check that a framework is installed: ``missing``, ``ok`` for a release that was tried, else ``limited``.

    Args:
        package: Name of the distribution.
        title: Name of the framework in messages.
        tried: The releases that were tried, for the message.
        was_tried: Whether a release is one of them.
    """
    try:
        release = version(package)
    except PackageNotFoundError:
        cost = f"install weightsync in {title}'s environment; run this there"
        return Finding(package, "missing", "not installed in this environment", cost)
    if was_tried(release):
        return Finding(package, "ok", release)
    return Finding(package, "limited", release, f"tried with {tried}; used if the interface fits")


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
