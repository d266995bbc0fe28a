"""Where a trainer's coordinator is, or one that rank 0 starts."""

from __future__ import annotations

from contextlib import ExitStack

import torch.distributed as dist

from weightsync.config import ClientSettings, Secret, Timeouts, variable
from weightsync.errors import ConfigurationError, CoordinatorUnreachable, WeightSyncError
from weightsync.launch import from_rank_zero


def find_coordinator(
    place: tuple[int, int], url: str | None, token: str | None, timeouts: Timeouts | None, owned: ExitStack, may_start: bool
) -> ClientSettings:
    """Return the settings of a trainer rank. ``place`` is its rank and their number.

    Without a URL, and if one may be started, rank 0 starts a coordinator, which ``owned`` closes, and tells the other ranks.

    Raises:
        ConfigurationError: Several ranks without ``torch.distributed`` have no URL.
        CoordinatorUnreachable: Rank 0 could not start it.
    """
    rank, world_size = place
    secret = Secret(token) if token else None
    if not may_start or url is not None or variable("WEIGHTSYNC_COORDINATOR"):
        return ClientSettings.load(coordinator=url, token=secret, timeouts=timeouts)
    if world_size > 1 and not dist.is_initialized():
        raise ConfigurationError(
            "several trainer ranks without torch.distributed need a coordinator: give its URL or set WEIGHTSYNC_COORDINATOR"
        )
    mine = ""
    failure: WeightSyncError | None = None
    if rank == 0:
        from weightsync.server.server import BackgroundServer  # takes a while to import, and most trainers never need it

        try:
            server = owned.enter_context(BackgroundServer())
            mine = f"{server.url} {server.token}"
        except WeightSyncError as error:
            failure = error  # the other ranks wait to hear of it
    where, _, known = (from_rank_zero(mine) if world_size > 1 else mine).partition(" ")
    if not where:
        raise failure or CoordinatorUnreachable("rank 0 could not start a coordinator in its process: its own error says why")
    return ClientSettings.load(coordinator=where, token=Secret(known), timeouts=timeouts)
