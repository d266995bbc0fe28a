"""The oracle of sources: nobody is given one to read from whose bytes did not fit, until it has verified a version again."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import weightsync.coordinator.round as protocol
from weightsync.coordinator.replicas import Replica
from weightsync.errors import VerificationError

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["SourceOracle"]


class SourceOracle:
    """Stands in for the real update of a replica from a source, and looks at who is given which source."""

    def __init__(self, world: World) -> None:
        self._world, self._update = world, protocol._update_from
        self._refuted: defaultdict[Replica, set[str]] = defaultdict(set)
        self._blamed: dict[int, Replica] = {}

    async def update(self, context: Any, report: Any, placing: Any, source: Any, final: bool) -> None:
        """As the real one."""
        replica, reader = source.replica, report.replica
        if replica is not None and self._refuted[replica]:
            self._world.violated("repeat", f"{reader} reads from {replica}, whose bytes did not fit {self._refuted[replica]}")
        try:
            await self._update(context, report, placing, source, final)
        except VerificationError:
            earlier = self._blamed.pop(id(report), None)
            if earlier is not None:  # the reader cannot read from anybody
                self._refuted[earlier].discard(reader.name)
            elif replica is not None:
                self._world.seen["a source was refuted"] += 1
                self._refuted[replica].add(reader.name)
                self._blamed[id(report)] = replica
            raise
        finally:
            if final:
                self._blamed.pop(id(report), None)

    def loaded(self, replica: Replica) -> None:
        """It has verified a version, or reports one to a coordinator."""
        self._refuted.pop(replica, None)
