"""A server that a trainer outside updates through a process group of its own: LMDeploy's and SGLang's routes, made whole.

::

    rank = DisaggregatedRank(MyAdapter(model))                 # on every engine rank
    updates = WeightUpdates(LocalRanks(rank))                  # in the server's front
    app = Starlette(routes=[*own_routes, *weight_update_routes(updates, Secret(token))])
    app.add_middleware(VersionedRequests, served=lambda: updates.version)

See ``docs/guides/disaggregated-update.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.first_use import on_first_use

if TYPE_CHECKING:
    from weightsync.external.rank import DisaggregatedRank
    from weightsync.external.ranks import LocalRanks, Ranks
    from weightsync.external.router import weight_update_routes
    from weightsync.external.versioned_requests import VersionedRequests
    from weightsync.external.weight_updates import Settings, WeightUpdates

__all__ = ["DisaggregatedRank", "LocalRanks", "Ranks", "Settings", "VersionedRequests", "WeightUpdates", "weight_update_routes"]

_MODULES = {
    "DisaggregatedRank": "rank", "LocalRanks": "ranks", "Ranks": "ranks", "Settings": "weight_updates",
    "VersionedRequests": "versioned_requests", "WeightUpdates": "weight_updates", "weight_update_routes": "router",
}  # fmt: skip


if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _MODULES)
