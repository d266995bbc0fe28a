"""A server that a trainer outside updates through a separate process group: LMDeploy's and SGLang's routes, made whole.

::

    rank = DisaggregatedRank(MyAdapter(model))                 # on every engine rank
    updates = WeightUpdates(LocalRanks(rank))                  # in the server's front
    app = Starlette(routes=[*own_routes, *weight_update_routes(updates, Secret(token))])
    app.add_middleware(VersionedRequests, served=lambda: updates.version)

``VersionedRequests`` is in :mod:`weightsync.external`. See ``docs/guides/disaggregated-update.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.first_use import on_first_use

if TYPE_CHECKING:
    from weightsync_disaggregated.rank import DisaggregatedRank
    from weightsync_disaggregated.ranks import LocalRanks, Ranks
    from weightsync_disaggregated.router import weight_update_routes
    from weightsync_disaggregated.weight_updates import Settings, WeightUpdates

__all__ = ["DisaggregatedRank", "LocalRanks", "Ranks", "Settings", "WeightUpdates", "weight_update_routes"]

_MODULES = {
    "DisaggregatedRank": "rank", "LocalRanks": "ranks", "Ranks": "ranks", "Settings": "weight_updates",
    "WeightUpdates": "weight_updates", "weight_update_routes": "router",
}  # fmt: skip


if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _MODULES)
