"""A server that a trainer outside updates through a process group of its own: LMDeploy's and SGLang's routes, made whole.

::

    rank = DisaggregatedRank(MyAdapter(model))                 # on every engine rank
    updates = WeightUpdates(LocalRanks(rank))                  # in the server's front
    app = Starlette(routes=[*own_routes, *weight_update_routes(updates, Secret(token))])

See ``docs/guides/disaggregated-update.md``.
"""

from __future__ import annotations

from weightsync.adapters.disaggregated.rank import DisaggregatedRank
from weightsync.adapters.disaggregated.ranks import LocalRanks, Ranks
from weightsync.adapters.disaggregated.router import weight_update_routes
from weightsync.adapters.disaggregated.session import Settings, WeightUpdates

__all__ = ["DisaggregatedRank", "LocalRanks", "Ranks", "Settings", "WeightUpdates", "weight_update_routes"]
