"""How engines are reached from outside: requests that name a version, HTTP requests to an engine, checkpoints on disk.

Updates from outside are in the package ``weightsync_disaggregated``. See ``docs/guides/disaggregated-update.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.first_use import on_first_use

if TYPE_CHECKING:
    from weightsync.external.versioned_requests import VersionedRequests
    from weightsync_disaggregated import DisaggregatedRank as DisaggregatedRank
    from weightsync_disaggregated import LocalRanks as LocalRanks
    from weightsync_disaggregated import Ranks as Ranks
    from weightsync_disaggregated import Settings as Settings
    from weightsync_disaggregated import WeightUpdates as WeightUpdates
    from weightsync_disaggregated import weight_update_routes as weight_update_routes

__all__ = ["VersionedRequests"]

_MODULES = {
    "VersionedRequests": "versioned_requests",
    # Old names, of modules that warn.
    "DisaggregatedRank": "rank", "LocalRanks": "ranks", "Ranks": "ranks", "Settings": "weight_updates",
    "WeightUpdates": "weight_updates", "weight_update_routes": "router",
}  # fmt: skip


if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _MODULES)
