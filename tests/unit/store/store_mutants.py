"""Bugs of the store, planted one at a time: random schedules must notice each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from tests.simulation.installation import replaced

from weightsync.deadline import Deadline
from weightsync.model import Version
from weightsync.model.stored import StoredObject
from weightsync.store import catalog, writer
from weightsync.store.objects import ObjectStore
from weightsync.store.signing import StoredVersion
from weightsync.store.writer import RankObjects

__all__ = ["STORE_MUTANTS"]


def _manifest_first() -> AbstractContextManager[None]:
    put, create, size = ObjectStore.put, ObjectStore.create, ObjectStore.size
    held: dict[str, list[bytes]] = {}

    def holding(store: ObjectStore, path: str, parts: Iterable[bytes]) -> None:
        held[path] = list(parts)

    def creating(store: ObjectStore, path: str, data: bytes) -> bool:
        created = create(store, path, data)
        for each in list(held):
            put(store, each, held.pop(each))
        return created

    def believed(store: ObjectStore, path: str) -> int:
        return sum(map(len, held[path])) if path in held else size(store, path)

    return replaced((ObjectStore, "put", holding), (ObjectStore, "create", creating), (ObjectStore, "size", believed))


def _chains_forgotten() -> AbstractContextManager[None]:
    last = property(lambda version: {rank.chain[-1].path: rank.chain[-1] for rank in version.stored.ranks})
    return replaced((StoredVersion, "objects", last))


def _no_grace() -> AbstractContextManager[None]:
    return replaced((catalog, "timedelta", lambda seconds: timedelta()))


def _overwritten_while_it_is_stored() -> AbstractContextManager[None]:
    pieces = writer._pieces
    return replaced((writer, "_pieces", lambda parts, check, hashes: pieces(parts, lambda: None, hashes)))


def _base_not_compared() -> AbstractContextManager[None]:
    extends, confirm = RankObjects._extends, RankObjects.confirm

    def anyhow(objects: RankObjects, changed: Any) -> Any:
        if changed is not None and objects._confirmed is not None:
            objects._confirmed = ((changed.epoch, changed.number), objects._confirmed[1])
        return extends(objects, changed)

    def kept(objects: RankObjects, version: Version, chain: tuple[StoredObject, ...] | None) -> None:
        if chain is not None:
            confirm(objects, version, chain)

    return replaced((RankObjects, "_extends", anyhow), (RankObjects, "confirm", kept))


def _never_too_late() -> AbstractContextManager[None]:
    return replaced((writer, "Deadline", _Forever))


class _Forever(Deadline):
    def remaining(self, what: str) -> float:
        return self.seconds


STORE_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "a manifest is written before its objects": _manifest_first,
    "garbage collection knows the last object of a chain only": _chains_forgotten,
    "garbage collection removes what is being written": _no_grace,
    "weights that change while they are stored are not noticed": _overwritten_while_it_is_stored,
    "a version that was not stored is taken for a base, and bases are not compared": _base_not_compared,
    "a manifest is written hours after its objects": _never_too_late,
}
"""Name to what plants it for as long as a ``with`` block runs."""
