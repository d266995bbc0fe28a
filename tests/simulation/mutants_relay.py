"""Bugs planted in a relay.

That it does not compare digests is no mutant: the region's coordinator holds what it places to the signature.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from msgspec import structs
from tests.simulation.installation import replaced
from tests.simulation.object_store import SIGNED_BODY

from weightsync.coordinator.publications import Publications
from weightsync.errors import WeightSyncError
from weightsync.protocol.messages import Hello
from weightsync.store import signing
from weightsync.store.catalog import manifest_path
from weightsync.store.objects import ObjectStore
from weightsync_relay import relay
from weightsync_relay.relay import Relay, _RelayTrainer, _StoredState

__all__ = ["RELAY_MUTANTS"]


def _unsigned() -> AbstractContextManager[None]:
    def believed(store: ObjectStore, run: str, order: tuple[int, int], public: bytes) -> Any:
        path = manifest_path(run, order)
        return signing._checked(signing._decoder.decode(bytes(store.read(path, 0, store.size(path))[SIGNED_BODY:])))

    return replaced((relay, "load", believed))


def _part_of_it() -> AbstractContextManager[None]:
    update, holds, hold, hello = _StoredState.update, _StoredState.holds, Publications.hold, _RelayTrainer._hello

    def careless(state: Any, stored: Any, deadline: Any) -> None:
        try:
            update(state, stored, deadline)
        except WeightSyncError:
            state.believed = stored.version

    def held(state: Any, stored: Any) -> bool:
        return holds(state, stored) or getattr(state, "believed", None) == stored.version

    def unsigned(publications: Publications, placement: Any) -> None:
        publications.promised = None
        publications.published.pop(placement.version.order, None)
        hold(publications, placement)

    def silent(trainer: Any) -> Hello:
        return structs.replace(hello(trainer), version=None)

    return replaced(
        (_StoredState, "update", careless),
        (_StoredState, "holds", held),
        (Publications, "hold", unsigned),
        (_RelayTrainer, "_hello", silent),
    )


def _first_epoch() -> AbstractContextManager[None]:
    publish = Relay._publish

    def same(follower: Any, stored: Any, state: Any, once: bool) -> None:
        trainer = follower._trainer
        if trainer is not None:  # the trainer that published before goes on
            trainer.first = structs.replace(trainer.first, epoch=stored.version.epoch)
        publish(follower, stored, state, once)

    return replaced((Relay, "_publish", same))


def _once() -> AbstractContextManager[None]:
    publish = Relay._publish

    def once(follower: Any, stored: Any, state: Any, once: bool) -> None:
        if follower._published is not None and follower._trainer is not None and follower._published[0] == stored.version:
            return
        publish(follower, stored, state, once)

    return replaced((Relay, "_publish", once))


RELAY_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "a relay believes a manifest whoever signed it": _unsigned,
    "a relay publishes a version before it is whole": _part_of_it,
    "a relay publishes a later epoch as the trainer of the one before": _first_epoch,
    "a relay does not publish again to a coordinator that was restarted": _once,
}
"""Name to what plants it for as long as a ``with`` block runs."""
