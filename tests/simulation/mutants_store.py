"""Bugs planted where replicas join from a store.

That only the hashes, or only the digests, are not compared is no mutant: with one of them left, wrong bytes are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from tests.simulation.installation import replaced
from tests.simulation.mutants_relay import RELAY_MUTANTS
from tests.simulation.object_store import SIGNED_BODY, STORE_URL

from weightsync.coordinator.coordinator import Coordinator
from weightsync.coordinator.stored_versions import StoredVersions
from weightsync.engine.engine_role import EngineRole
from weightsync.model.stored import CHUNK_BYTES, StoredObject
from weightsync.planning.coverage import Coverage
from weightsync.store import catalog, region, signing
from weightsync.store.objects import ObjectStore
from weightsync.store.region import StoredRegion

__all__ = ["STORE_MUTANTS"]


def _nothing_compared() -> AbstractContextManager[None]:
    def unverified(store: ObjectStore, item: StoredObject, chunk: int) -> Any:
        begin = chunk * CHUNK_BYTES
        return np.frombuffer(store.read(item.path, begin, min(begin + CHUNK_BYTES, item.nbytes)), np.uint8)

    return replaced(
        (region, "verified_chunk", unverified),
        (Coverage, "check", lambda cover, digests, expected: None),
        (EngineRole, "_holds", lambda role, version, moved, cover: True),
    )


def _delta_left_out() -> AbstractContextManager[None]:
    make = StoredRegion.__init__

    def short(stored: StoredRegion, *rest: Any) -> None:
        make(stored, *rest)
        stored._deltas = stored._deltas[:-1]

    return replaced((StoredRegion, "__init__", short))


def _any_signature() -> AbstractContextManager[None]:
    def believed(data: Any, public: bytes, run: str, order: tuple[int, int]) -> Any:
        return signing._checked(signing._decoder.decode(bytes(data[SIGNED_BODY:])))

    return replaced((catalog, "opened", believed))


def _stored_too_early() -> AbstractContextManager[None]:
    sign = StoredVersions._signed

    def early(versions: StoredVersions, gathering: Any, step: int | None) -> bytes:
        data = sign(versions, gathering, step)
        version = gathering.placement.version
        versions.adopt(signing.opened(data, versions.key.public, version.run, version.order), STORE_URL)
        return data

    return replaced((StoredVersions, "_signed", early))


def _left_alone() -> AbstractContextManager[None]:
    leave = Coordinator.leave

    def broken(coordinator: Coordinator, *rest: Any, **named: Any) -> None:
        coordinator._seed_wanted = lambda names=(): None  # type: ignore[method-assign]
        try:
            leave(coordinator, *rest, **named)
        finally:
            del coordinator._seed_wanted

    return replaced((Coordinator, "leave", broken))


def _seeded_again() -> AbstractContextManager[None]:
    seed = Coordinator._seed

    async def broken(coordinator: Coordinator, names: Any, deadline: Any, *, late: bool = False) -> Any:
        return await seed(coordinator, names, deadline)

    return replaced((Coordinator, "_seed", broken))


STORE_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "what a replica reads from the store is compared with nothing": _nothing_compared,
    "a stored chain is applied with one delta left out": _delta_left_out,
    "a stored manifest is believed whoever signed it": _any_signature,
    "a version counts as stored before its manifest is": _stored_too_early,
    "a replica that could not read from a dying trainer waits for it": _left_alone,
    "seeding takes out of service whom the round before it updated": _seeded_again,
    **RELAY_MUTANTS,
}
"""Name to what plants it for as long as a ``with`` block runs."""
