"""Bugs planted on purpose. The simulation must notice each of them within a bounded number of schedules, or it has no teeth.

Some take out two lines of defence at once (the round's order and the rank's own refusal, say): with one of them left, nothing wrong
comes of it, which is the point of having both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from tests.simulation.installation import replaced
from tests.simulation.mutants_deltas import DELTA_MUTANTS
from tests.simulation.mutants_loras import LORA_MUTANTS
from tests.simulation.mutants_of_calls import MUTANTS_OF_CALLS
from tests.simulation.mutants_people import PEOPLE_MUTANTS
from tests.simulation.mutants_publication import PUBLICATION_MUTANTS
from tests.simulation.mutants_store import STORE_MUTANTS
from tests.simulation.mutants_stream import STREAM_MUTANTS
from tests.simulation.transfer import SimulatedReader

from weightsync import failpoints
from weightsync.coordinator import round as protocol
from weightsync.coordinator.coordinator import Coordinator
from weightsync.coordinator.rank_handle import RoundDeadline
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.report import Report
from weightsync.coordinator.round_context import Engines
from weightsync.deadline import Deadline
from weightsync.engine import adapter_calls
from weightsync.engine.engine_role import EngineRole
from weightsync.engine.session import EngineSession, Ticket
from weightsync.errors import DeadlineExceeded, WeightSyncError
from weightsync.model import Version
from weightsync.planning.coverage import Coverage
from weightsync.protocol.messages import Commit, Done, Move, Pause, Place, Resume
from weightsync.tensors.memory_views import bytes_at
from weightsync.trainer.trainer_role import TrainerRole

__all__ = ["MUTANTS"]

Mutant = Callable[[], AbstractContextManager[None]]


def _resumed_whatever(role: EngineRole, body: Resume, deadline: Deadline) -> None:
    role.session._calls.resume()
    role.session.state = "serving"


def _resumed_unless_uncommitted(role: EngineRole, body: Resume, deadline: Deadline) -> None:
    if role.session.state != "committed":
        raise WeightSyncError("not committed")
    _resumed_whatever(role, body, deadline)


def _resume_before_verify() -> AbstractContextManager[None]:
    move = protocol.move

    async def broken(engines: Engines, *rest: Any) -> Any:
        moved = await move(engines, *rest)
        await protocol.resume(engines, next(value for value in rest if isinstance(value, RoundDeadline)))
        return moved

    return replaced((protocol, "move", broken), (EngineRole, "_resume", _resumed_whatever))


def _label_before_commit() -> AbstractContextManager[None]:
    move = EngineRole._move

    def broken(role: EngineRole, body: Move, deadline: Deadline) -> Any:
        role.adapter.finish(Version("simulated", body.number, role.manifest.fingerprint, ""))
        return move(role, body, deadline)

    return replaced((EngineRole, "_move", broken))


def _loaded_before_commit() -> AbstractContextManager[None]:
    updating: set[Replica] = set()
    begin, succeed, fail, commit = Replica.begin, Replica.succeed, Replica.fail, protocol.commit

    async def committing(engines: Engines, version: Version, *rest: Any) -> None:
        for replica in updating:
            if replica.members() == dict(engines):
                replica.become("loaded", version)
        await commit(engines, version, *rest)

    def beginning(replica: Replica, links: Any) -> None:
        begin(replica, links)
        updating.add(replica)

    def succeeding(replica: Replica, links: Any, version: Version) -> None:
        updating.discard(replica)
        if replica.state == "updating":
            succeed(replica, links, version)

    def failing(replica: Replica, links: Any, error: str) -> None:
        updating.discard(replica)
        fail(replica, links, error)

    return replaced(
        (protocol, "commit", committing),
        (Replica, "begin", beginning),
        (Replica, "succeed", succeeding),
        (Replica, "fail", failing),
    )


def _ack_before_copy() -> AbstractContextManager[None]:
    read = SimulatedReader.read

    def broken(source: SimulatedReader, group: int, *rest: Any) -> Any:
        tiles = source._groups[group]
        runs = [
            (int(tiles.target[i] + row * tiles.target_stride[i]), int(tiles.row_bytes[i]))
            for i in range(len(tiles))
            for row in range(int(tiles.rows[i]))
        ]
        before = [bytes_at(address, size).copy() for address, size in runs]
        answer = read(source, group, *rest)
        after = [bytes_at(address, size).copy() for address, size in runs]
        memory = source.engine.memory.storage  # kept, whatever becomes of the process

        def copy() -> None:
            for (address, size), new in zip(runs, after, strict=True):
                if memory.numel():
                    bytes_at(address, size)[:] = new
            source.engine.written(None)

        if source.engine.kind == "direct":
            for (address, size), old in zip(runs, before, strict=True):
                bytes_at(address, size)[:] = old
            source.world.loop.call_later(0.03, copy)
        return answer

    return replaced((SimulatedReader, "read", broken))


def _dirty_resumed() -> AbstractContextManager[None]:
    async def broken(engines: Engines, reason: str, grace: float) -> None:
        for link in engines.values():
            try:
                await asyncio.wait_for(link.ask(Resume(), Done, grace), grace)
            except (WeightSyncError, TimeoutError):
                continue

    return replaced((protocol, "quarantine", broken), (EngineRole, "_resume", _resumed_whatever))


def _ignoring_deadline(phase: str) -> Mutant:
    def mutant() -> AbstractContextManager[None]:
        real = getattr(protocol, phase)

        async def broken(engines: Engines, *rest: Any) -> Any:
            return await real(engines, *(RoundDeadline(10_000.0) if isinstance(value, RoundDeadline) else value for value in rest))

        return replaced((protocol, phase, broken))

    return mutant


def _digest_not_compared() -> AbstractContextManager[None]:
    unchecked = (Coverage, "check", lambda cover, digests, expected: None)
    return replaced(unchecked, (EngineRole, "_holds", lambda role, version, moved, cover: True))


def _rank_not_comparing() -> AbstractContextManager[None]:
    return replaced((EngineRole, "_holds", lambda role, version, moved, cover: True))


def _one_rank_verified() -> AbstractContextManager[None]:
    real = Coverage.check

    def broken(cover: Coverage, digests: Any, expected: Any) -> None:
        if any(member.endswith("/0") for member in digests):
            real(cover, digests, expected)

    return replaced((Coverage, "check", broken))


def _quarantine_skipped() -> AbstractContextManager[None]:
    async def broken(engines: Engines, reason: str, grace: float) -> None:
        await asyncio.sleep(0)

    import weightsync.coordinator.coordinator as coordinator

    return replaced((protocol, "quarantine", broken), (coordinator, "quarantine", broken))


def _stale_region() -> AbstractContextManager[None]:
    real = TrainerRole._place

    earlier: WeakKeyDictionary[TrainerRole, Any] = WeakKeyDictionary()

    def broken(role: TrainerRole, body: Place, deadline: Any) -> Any:
        placing = role._armed
        if role not in earlier or placing is None or placing.number is not None or placing.call != body.call:
            earlier[role] = real(role, body, deadline)
            return earlier[role]
        with role.region.placing(body.number):
            placing.number = body.number
        placing.set()
        return earlier[role]

    return replaced((TrainerRole, "_place", broken))


def _late_commit() -> AbstractContextManager[None]:
    commit = EngineRole._commit

    def committing(role: EngineRole, body: Commit, deadline: Deadline) -> None:
        commit(role, body, deadline)
        role.session._calls.resume()

    def quarantining(session: EngineSession, call: Ticket, deadline: Deadline) -> None:
        session._due = None

    return replaced((EngineRole, "_commit", committing), (EngineSession, "_quarantine", quarantining))


def _served_while_pausing() -> AbstractContextManager[None]:
    def broken(role: EngineRole, body: Pause, deadline: Deadline) -> None:
        failpoints.reached("engine.pausing")
        failpoints.reached("engine.pause")
        role.session._calls.pause(body.mode, deadline.remaining("pausing"))
        role.session.state = "paused"
        role.session.check_abort()

    return replaced((EngineRole, "_pause", broken))


def _served_while_paused() -> AbstractContextManager[None]:
    return replaced((EngineSession, "served_version", property(lambda session: session.serving)))


def _resumed_after_quarantine() -> AbstractContextManager[None]:
    """Either guard would do alone: a resume that looks for aborts, and a quarantine that outlives its own deadline."""

    def broken(session: EngineSession, call: Ticket, deadline: Deadline) -> None:
        session._due = None
        with session.turn(call, deadline):
            session._quarantine(call, deadline)

    return replaced((EngineRole, "_resume", _resumed_unless_uncommitted), (EngineSession, "quarantine", broken))


def _published_before_copy() -> AbstractContextManager[None]:
    arm = TrainerRole.arm

    def broken(role: TrainerRole, call: int, number: int | None) -> Any:
        event = arm(role, call, number)
        event.set()
        return event

    return replaced((TrainerRole, "arm", broken), (TrainerRole, "disarm", lambda role: None))


def _one_word_for_all() -> AbstractContextManager[None]:
    real = Coordinator._reconcile

    def broken(coordinator: Coordinator, replica: Replica) -> None:
        first = replica.links[0].serving
        for link in replica.links.values():
            link.serving = first
        real(coordinator, replica)

    return replaced((Coordinator, "_reconcile", broken))


def _one_fails_all() -> AbstractContextManager[None]:
    real = Report.result

    def broken(report: Report, publications: Any) -> Any:
        result = real(report, publications)
        if result.error is not None:
            raise DeadlineExceeded(result.error)
        return result

    return replaced((Report, "result", broken))


def _rounds_at_the_same_time() -> AbstractContextManager[None]:
    @asynccontextmanager
    async def broken(coordinator: Coordinator, limit: RoundDeadline) -> AsyncIterator[None]:
        yield

    return replaced((Coordinator, "_serialize", broken))


def _pause_not_awaited() -> AbstractContextManager[None]:
    def broken(role: EngineRole, body: Pause, deadline: Deadline) -> None:
        role.session.state = "paused"
        for adapter in role.session._calls._adapters:
            vars(adapter)[adapter_calls._PAUSED] = True

    return replaced((EngineRole, "_pause", broken))


MUTANTS: dict[str, Mutant] = {
    "resume before verify": _resume_before_verify,
    "label before commit": _label_before_commit,
    "replica loaded before commit": _loaded_before_commit,
    "ack before the copy is done": _ack_before_copy,
    "dirty replica resumed": _dirty_resumed,
    "deadline ignored in move": _ignoring_deadline("move"),
    "deadline ignored in commit": _ignoring_deadline("commit"),
    "digest not compared": _digest_not_compared,
    "a replica's only rank does not compare": _rank_not_comparing,
    "only rank 0 verified": _one_rank_verified,
    "quarantine skipped": _quarantine_skipped,
    "stale region published": _stale_region,
    "late commit of a cancelled round applied": _late_commit,
    "version served while pausing": _served_while_pausing,
    "version served while paused": _served_while_paused,
    "resumed after a quarantine": _resumed_after_quarantine,
    "publish returns before the copy": _published_before_copy,
    "one rank's word taken for all": _one_word_for_all,
    "a failed replica fails the others": _one_fails_all,
    "rounds run at the same time": _rounds_at_the_same_time,
    "pause answered before the engine stands": _pause_not_awaited,
    **DELTA_MUTANTS,
    **LORA_MUTANTS,
    **PUBLICATION_MUTANTS,
    **MUTANTS_OF_CALLS,
    **STREAM_MUTANTS,
    **PEOPLE_MUTANTS,
    **STORE_MUTANTS,
}
"""Name to what plants it for as long as a ``with`` block runs."""
