"""Holds that the checkers of these tests bite: with the protocol broken on purpose, each break is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.coordinator.fakes import GRACE, World
from tests.virtual_time import run, virtual

from weightsync.config import RoundSettings
from weightsync.coordinator import round as protocol
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline
from weightsync.coordinator.replicas import TRANSITIONS, Replica
from weightsync.errors import PeerLost, WeightSyncError
from weightsync.model import Version
from weightsync.protocol.messages import Done, Resume

FAULTS = [
    {},
    {("sick/1", "move"): "corrupt"},
    {("sick/1", "move"): "partial"},
    {("sick/1", "move"): "hang"},
    {("sick/1", "resume"): "late"},
    {("sick/1", "pause"): "fail"},
]


async def _evidence(faults: Mapping[tuple[str, str], str]) -> list[str]:
    """What the checkers find in two rounds, the second one with these faults."""
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0, retry=False))  # what one round left is looked at
    world.add_trainers(2)
    world.add_replica("sick", ranks=2)
    world.add_replica("well", ranks=2)
    found: list[str] = []
    for number in (1, 2):
        if number == 2:
            world.faults.update(faults)
        try:
            result = await asyncio.wait_for(world.publish(number, timeout=60.0), 61.0)
            if not result.ok:
                found.append(f"round failed: {result.error}")
        except (WeightSyncError, TimeoutError) as error:
            found.append(f"{type(error).__name__}: {error}")
        found += world.problems()
        if world.states()["well"] != ("loaded", number):
            found.append(f"well is {world.states()['well']}")
    return found + world.alarms


def evidence() -> list[str]:
    return [line for faults in FAULTS for line in run(_evidence(faults))]


def resume_before_verify(patch: pytest.MonkeyPatch) -> None:
    move = protocol.move

    async def broken(engines: Any, number: int, agreed: Any, limit: RoundDeadline, *rest: Any) -> Any:
        moved = await move(engines, number, agreed, limit, *rest)
        await protocol.resume(engines, limit)
        return moved

    patch.setattr(protocol, "move", broken)


def label_before_verify(patch: pytest.MonkeyPatch) -> None:
    move = protocol.move

    async def broken(engines: Any, number: int, agreed: Any, limit: RoundDeadline, *rest: Any) -> Any:
        moved = await move(engines, number, agreed, limit, *rest)
        await protocol.commit(engines, Version("test", number, "", ""), limit)
        return moved

    patch.setattr(protocol, "move", broken)


def resume_the_dirty(patch: pytest.MonkeyPatch) -> None:
    async def broken(engines: Any, reason: str, grace: float) -> None:
        for link in engines.values():
            await link.ask(Resume(), Done, grace)

    patch.setattr(protocol, "quarantine", broken)


def _nothing(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def patched(patch: pytest.MonkeyPatch) -> None:
        async def broken(*_: object) -> None:
            await asyncio.sleep(0)

        patch.setattr(protocol, name, broken)

    patched.__name__ = f"no_{name}"
    return patched


def forget_the_deadline(patch: pytest.MonkeyPatch) -> None:
    move: Callable[..., Awaitable[Any]] = protocol.move

    async def broken(engines: Any, number: int, agreed: Any, limit: RoundDeadline, *rest: Any) -> Any:
        return await move(engines, number, agreed, RoundDeadline(10_000.0), *rest)

    patch.setattr(protocol, "move", broken)


def forgive_the_dirty(patch: pytest.MonkeyPatch) -> None:
    """A failed replica is taken for loaded with what it had before."""

    def broken(self: Replica, links: Any, error: str) -> None:
        if self.state == "updating":
            self.become("loaded", Version("test", 1, "", ""))

    patch.setattr(Replica, "fail", broken)


BREAKS = [
    resume_before_verify,
    label_before_verify,
    resume_the_dirty,
    forget_the_deadline,
    forgive_the_dirty,
    _nothing("quarantine"),
    _nothing("verify"),
    _nothing("pause"),
    _nothing("commit"),
    _nothing("resume"),
]


def test_the_protocol_itself_gives_no_evidence() -> None:
    assert evidence() == []


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_a_break_is_noticed(broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert evidence() != []


def test_a_dirty_replica_cannot_become_loaded_without_an_update() -> None:
    assert [state for state, after in TRANSITIONS.items() if "loaded" in after] == ["registered", "loaded", "updating"][0::2]
    replica = Replica("r", 1, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cannot go from registered to registered"):
        replica.become("registered")
    replica.become("updating")
    replica.become("dirty")
    with pytest.raises(RuntimeError, match="cannot go from dirty to loaded"):
        replica.become("loaded", Version("test", 1, "", ""))
    with pytest.raises(RuntimeError, match="exactly a loaded replica has a version"):
        replica.become("updating", Version("test", 1, "", ""))


@virtual
async def test_a_rank_that_leaves_after_its_last_answer_leaves_the_others_with_the_version() -> None:
    version = Version("test", 1, "", "")
    links: dict[str, RankHandle[Any]] = {}
    replica = Replica("r", 2, None)  # type: ignore[arg-type]
    for number in range(2):
        rank = SimpleNamespace(
            member=f"r/{number}",
            hello=SimpleNamespace(rank=number, serving=None, loras=(), refuted="", host=SimpleNamespace(name="host"), pid=1),
        )
        links[rank.member] = replica.links[number] = RankHandle(SimpleNamespace(rank=rank))
    replica.begin(links)
    replica.detach(links["r/1"], "its process closed it", clean=True)
    replica.succeed(links, version)
    assert replica.state == "lost"
    assert links["r/0"].serving == version
    with pytest.raises(PeerLost, match="a rank of replica r disconnected"):
        vanished = Replica("r", 2, None)  # type: ignore[arg-type]
        vanished.links = dict(enumerate(links.values()))
        vanished.begin(links)
        vanished.detach(links["r/1"], "killed")
        vanished.succeed(links, version)
