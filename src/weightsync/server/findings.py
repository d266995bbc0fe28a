"""Results of checks (``weightsync doctor``, ``python -m weightsync.integrations``), and checks that several of them make."""

from __future__ import annotations

from typing import Literal

import msgspec

from weightsync.config import ClientSettings, Timeouts, token_source
from weightsync.errors import AuthenticationError, CoordinatorUnreachable, DeadlineExceeded
from weightsync.releases import RELEASES, release_of, releases_tested, was_tested
from weightsync.server.client import Client

_SECONDS = 3.0

Status = Literal["ok", "limited", "missing", "unknown"]


class Finding(msgspec.Struct, frozen=True):
    """Result of one check: what was found, and its impact if the status is not ``ok``."""

    name: str
    status: Status
    value: str
    cost: str = ""


def find_release(package: str) -> Finding:
    """Check that an engine or framework is installed: ``missing``, ``ok`` for a tested release, otherwise ``limited``."""
    release, tested = release_of(package), releases_tested(package)
    if release is None:
        title = RELEASES[package].title
        return Finding(
            package, "missing", "not installed in this environment",
            f"install weightsync in {title}'s environment; run this there. Tested: {tested}",
        )  # fmt: skip
    if was_tested(package, release):
        return Finding(package, "ok", f"{release}; tested: {tested}")
    return Finding(package, "limited", f"{release}; tested: {tested}", "used if its interface fits")


def find_token_of_workers(maker: str, where: str) -> Finding:
    """Check that workers find a token: one that is set, or one that ``maker`` makes. ``where`` says where to set one."""
    source = token_source()
    if source is not None:
        return Finding("token", "ok", f"from {source}; every node needs the same")
    return Finding(
        "token", "limited", f"none in this environment: {maker} leaves one in a file of this user",
        f"enough on one node. For several nodes set WEIGHTSYNC_TOKEN_FILE {where}",
    )  # fmt: skip


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
            "start one with `weightsync serve` or `weightsync relay`, or give its URL: --coordinator or WEIGHTSYNC_COORDINATOR",
        )  # fmt: skip
    members = f"trainer ranks: {len(status.trainer)}, replicas: {len(status.replicas)}"
    return Finding(name, "ok", f"run {status.run} at {where}: the token is accepted; {members}")
