"""Bugs planted in how trainer ranks gather, and in which replicas a publication accounts for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.simulation.installation import replaced

from weightsync.coordinator.membership import Membership
from weightsync.coordinator.publish_barrier import PublishBarrier
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.round_context import Sources
from weightsync.errors import PeerLost

__all__ = ["PUBLICATION_MUTANTS"]


def _place_not_kept() -> AbstractContextManager[None]:
    def broken(rendezvous: PublishBarrier, member: str, reason: str, clean: bool = False) -> None:
        gathering = rendezvous._gathering
        if gathering is not None and member in gathering.places:
            rendezvous._fail(gathering, PeerLost(f"{member} is gone ({reason})"))

    return replaced((PublishBarrier, "left", broken))


def _left_out_dropped() -> AbstractContextManager[None]:
    return replaced((Membership, "left_out", lambda members: []))


def _not_fed_again() -> AbstractContextManager[None]:
    return replaced((Sources, "alternative", lambda sources, source, replica: False))


def _refuted_offered_again() -> AbstractContextManager[None]:
    readable = property(lambda replica: replica.routable and all(link.rank.source for link in replica.links.values()))
    return replaced((Replica, "readable", readable))


PUBLICATION_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "a rank that blinks while ranks gather loses its place": _place_not_kept,
    "a replica whose source failed is not fed again": _not_fed_again,
    "a source whose bytes did not fit is offered again": _refuted_offered_again,
    "replicas that are lost or refused are dropped from results": _left_out_dropped,
}
"""Name to what plants it for as long as a ``with`` block runs."""
