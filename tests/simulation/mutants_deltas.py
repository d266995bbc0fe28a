"""Bugs planted in rounds that move only what changed.

That a rank compares neither the base nor its own parameters is no mutant, and neither are lists that leave out what changed in one
of several versions. The digests of what it predicts are compared with the new version's, so it gets all bytes, and nothing wrong
comes of it. So these two are planted without that comparison. The last one, of what was installed, is still there: the words are
put back, and the replica fails to get a version although nothing is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from tests.simulation.installation import replaced

from weightsync.arrays import Int64, UInt64
from weightsync.coordinator import agreement
from weightsync.coordinator import round as protocol
from weightsync.coordinator.publications import Placement
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.round_context import Engines
from weightsync.deadline import Deadline
from weightsync.engine.fill.direct import StagedChanges
from weightsync.engine.fill.streamed import StreamedFiller
from weightsync.protocol.messages import Stage
from weightsync.publishing import listed_changes
from weightsync.tensors.changes import Sections, Step, unite

__all__ = ["DELTA_MUTANTS"]


async def _unpredicted(*_: object) -> None:
    """In place of the thread that compares what is staged."""


def _undo_left_out() -> AbstractContextManager[None]:
    return replaced((StagedChanges, "revert", lambda staged, deadline: None))


def _base_not_compared() -> AbstractContextManager[None]:
    stage = agreement.stage

    async def anyhow(replica: Replica, engines: Engines, agreed: Any, placement: Placement, *rest: Any) -> Any:
        if replica.version is not None:
            found = tuple(replace(delta, base=replica.version) for delta in placement.deltas)
            placement = replace(placement, deltas=found)
        return await stage(replica, engines, agreed, placement, *rest)

    return replaced((protocol, "stage", anyhow), (agreement, "in_thread", _unpredicted))


def _union_short() -> AbstractContextManager[None]:
    def short(sections: Sections, addresses: Int64, steps: list[Step], *rest: Any) -> int | None:
        return unite(sections, addresses, steps[1:], *rest)

    return replaced((listed_changes, "unite", short), (agreement, "in_thread", _unpredicted))


def _tensor_left_out() -> AbstractContextManager[None]:
    def short(filler: StreamedFiller, body: Stage, held: UInt64, deadline: Deadline) -> Any:
        wanted = np.frombuffer(body.digests, "<u8").astype(np.uint64)[filler.layout.tensor]
        changed = wanted != held
        changed[np.flatnonzero(changed)[1:]] = False
        return stage(filler, body, np.where(changed, wanted, held), deadline)

    stage = StreamedFiller.stage
    return replaced((StreamedFiller, "stage", short))


DELTA_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "words that were replaced are not put back": _undo_left_out,
    "the base of what changed is not compared": _base_not_compared,
    "what changed in several versions is short by one": _union_short,
    "a tensor that changed is not streamed": _tensor_left_out,
}
"""Name to what plants it for as long as a ``with`` block runs."""
