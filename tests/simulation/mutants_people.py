"""Repairs taken out again, one at a time: defects A1, A3, A4, N2, N3, N4 of the second review, and what these schedules found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from msgspec import structs
from tests.simulation.installation import replaced

from weightsync.coordinator import coordinator
from weightsync.coordinator import round as protocol
from weightsync.coordinator.keyed_digests import KeyedDigester
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.publications import Publications
from weightsync.coordinator.publish_barrier import PublishBarrier
from weightsync.coordinator.replicas import Replica
from weightsync.engine.engine_role import EngineRole
from weightsync.engine.fill.filler import PlanFiller
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import VersionError
from weightsync.protocol.messages import Place, Publish
from weightsync.server.app import TokenAdmission
from weightsync.trainer.trainer_role import Placing, TrainerRole

__all__ = ["PEOPLE_MUTANTS"]


def _memory_not_followed_in_the_pause() -> AbstractContextManager[None]:
    real = EngineRole._follow_memory

    def broken(role: EngineRole, filler: PlanFiller, *given: Any) -> PlanFiller:
        return filler if role.session.state == "writing" else real(role, filler, *given)

    return replaced((EngineRole, "_follow_memory", broken))


def _placed_for_any_call() -> AbstractContextManager[None]:
    real = TrainerRole._place_armed

    def broken(role: TrainerRole, placing: Placing | None, body: Place, deadline: Any) -> Any:
        return real(role, placing, body if placing is None else structs.replace(body, call=placing.call), deadline)

    return replaced((TrainerRole, "_place_armed", broken))


def _each_rank_enters_alone() -> AbstractContextManager[None]:
    def broken(adapter: ModuleAdapter, me: object, timeout: float) -> None:
        with adapter._changed:
            adapter._wait_until_free(timeout)
            adapter._users[me] = None

    return replaced((ModuleAdapter, "_enter_in_step", broken))


def _public_digest_believed() -> AbstractContextManager[None]:
    real: Any = protocol._step_by_step
    keyed = list(inspect.signature(real).parameters).index("keyed")

    def broken(*given: Any) -> Any:
        return real(*given[:keyed], None, *given[keyed + 1 :])

    return replaced((protocol, "_step_by_step", broken))


async def _no_key(digester: KeyedDigester, *_: object) -> None:
    """No trainer rank is asked for digests under a key."""


def _workers_are_operators() -> AbstractContextManager[None]:
    real = TokenAdmission._admits

    def broken(admission: TokenAdmission, header: str, scope: Any) -> Any:
        kind, *answer = real(admission, header, scope)
        return ("operator" if kind == "token" else kind), *answer

    return replaced((TokenAdmission, "_admits", broken))


def _claims_seed_replicas() -> AbstractContextManager[None]:
    """With the digests under a key in place, a claim alone brings nothing: both are taken out."""

    def broken(members: Membership, publications: Publications, readers: Collection[Replica] = ()) -> list[Replica]:
        order = (publications.epoch, publications.last)
        published = publications.published.get(order)
        if members.streams or (published is None and publications.published):
            return []
        others = (replica for replica in members.replicas.values() if replica.readable and replica not in readers)
        serving = [(replica, replica.version) for replica in others if replica.version is not None]
        return [replica for replica, version in serving if version.order == order and published in (None, version)]

    return replaced((coordinator, "serving_weights", broken), (KeyedDigester, "draw", _no_key))


def _calls_not_counted() -> AbstractContextManager[None]:
    return replaced((PublishBarrier, "_counted", lambda *_: None))


def _interrupted_calls_wait() -> AbstractContextManager[None]:
    real = PublishBarrier._in_step

    def broken(barrier: PublishBarrier, gathering: Any, member: str, number: int | None, place: Any) -> Any:
        held = gathering.places.get(member)
        if held is not None and held.link is place.link:
            raise VersionError(f"{member} is already publishing {gathering.what}")
        return real(barrier, gathering, member, number, place)

    return replaced((PublishBarrier, "_in_step", broken))


def _placed_numbers_used_again() -> AbstractContextManager[None]:
    real: Any = PublishBarrier.publish

    def broken(barrier: PublishBarrier, member: str, asked: Publish, deadline: Any) -> Any:
        return real(barrier, member, structs.replace(asked, above=-1), deadline)

    return replaced((PublishBarrier, "publish", broken))


def _claims_for_good() -> AbstractContextManager[None]:
    def broken(publications: Publications, role: str, member: str, epoch: int, number: int) -> None:
        if number >= 0:
            publications.own = publications.newest = max(publications.own, (epoch, number))

    return replaced((Publications, "claim", broken))


PEOPLE_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "parameters that moved before the pause are not followed": _memory_not_followed_in_the_pause,
    "an earlier call's version is placed from later weights": _placed_for_any_call,
    "ranks that generate in step enter one by one": _each_rank_enters_alone,
    "a replica's bytes are compared by their public digest": _public_digest_believed,
    "a worker's token admits to operators' actions": _workers_are_operators,
    "a claim in a Hello seeds replicas": _claims_seed_replicas,
    "calls of trainer ranks are not counted": _calls_not_counted,
    "an interrupted call holds its rank's place": _interrupted_calls_wait,
    "a number that was placed for a coordinator that died is used again": _placed_numbers_used_again,
    "a claim in a Hello counts for good": _claims_for_good,
}
"""Name to what plants it for as long as a ``with`` block runs. Schedules of people notice them."""
