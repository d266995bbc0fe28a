"""One case after the other: a party killed, stopped or lied to at a point of a round; then everything must be right again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from tests.faults.forked import ORPHAN, UNWIND, await_loss, kept
from tests.faults.leaks import Held, grown, held
from tests.faults.network import Network
from tests.faults.parties import LISTS, STAGED
from tests.faults.points import (
    COORDINATOR_POINTS,
    DELTA_POINTS,
    ENGINE_ALONE_POINTS,
    ENGINE_POINTS,
    ENGINE_REPAIR_POINTS,
    ENGINE_TOGETHER_POINTS,
    STORE_POINTS,
    TRAINER_POINTS,
)
from tests.faults.relay import Relay
from tests.faults.stage import Party, Stage, Tally, Trap

from weightsync.errors import Aborted, DeadlineExceeded, MembershipError, PeerLost, WeightSyncError

__all__ = [
    "CHANGED_ONE_OF",
    "CORRUPTIONS",
    "DELTAS",
    "FORK_MUTANT_ACTS",
    "IMPAIRMENTS",
    "STORE",
    "TRANSPORTS",
    "Case",
    "Findings",
    "cases",
    "fork_mutant_is_caught",
    "look_for_leaks",
    "run_cases",
    "spare_threads",
    "warm_up",
]

DELTAS = "deltas"
STORE = "store"
TRANSPORTS = ("shared_memory", "tcp", "relay", "network", "nixl", DELTAS, STORE)
"""``relay`` is encrypted TCP by way of a relay that can do what networks do; ``network`` TCP to another network namespace, where a
cable can be cut; ``deltas`` shared memory, of which replicas read what changed; ``store`` the same, and trainers
store their versions in a folder."""
CHANGED_ONE_OF = 64
"""Elements of which a version with deltas changes one."""
IMPAIRMENTS = ("delay", "loss")
CORRUPTIONS = ("flip", "swap", "drop", "repeat", "reorder")
FORK_MUTANT_ACTS = {
    "a forked child's close empties the region": UNWIND,
    "a forked child keeps the control connection": ORPHAN,
    "a forked child keeps the shared memory": ORPHAN,
}
"""For each mutant of :mod:`tests.faults.fork_mutants`, the act of the cases that must notice it."""
_REVERT_POINTS = tuple(point for point in DELTA_POINTS if "revert" in point)
_DEADLINE = 2.0  # seconds for a publication that meets a fault
_WELL = 20.0  # seconds for one that nobody holds up
_SLACK = 1.0  # seconds after its deadline in which it must have ended
_REACHED = 5.0  # seconds until a party must have come to its point


@dataclass(frozen=True)
class Case:
    """``act`` on ``party`` at ``point``; for corruptions ``act`` is the kind and ``seed`` says where."""

    transport: str
    party: str
    point: str
    act: str
    seed: int = 0

    @property
    def name(self) -> str:
        """As ``--only`` and ``--list`` know it."""
        return f"{self.transport}/{self.act}/{self.party}/{self.point}" + (f"/{self.seed}" if self.seed else "")


@dataclass
class Findings:
    """What went wrong; empty lists are what the campaign wants."""

    run: int = 0
    """Cases."""
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    uncaught: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Anything else: a survivor that does not serve, a peer that is not re-seeded, a point that was never reached."""
    went_on: int = 0
    """Replicas that served the version before again after an update failed in their pause."""


def cases(transports: tuple[str, ...] = TRANSPORTS) -> Iterator[Case]:
    """All of them, in the order in which they run."""
    alone = [point for point in (*ENGINE_ALONE_POINTS, *ENGINE_POINTS) if "prepare" not in point]  # which is agreed once a plan
    parties = {
        "trainer-0": TRAINER_POINTS,
        "trainer-1": TRAINER_POINTS,
        "duo-1": (*ENGINE_TOGETHER_POINTS, *ENGINE_POINTS, *ENGINE_REPAIR_POINTS),
        "solo-0": (*alone, *ENGINE_REPAIR_POINTS),
    }
    for transport in transports:
        if transport == DELTAS:
            yield from _delta_cases()
            continue
        if transport == STORE:
            for act, rank in (("kill", 0), ("kill", 1), ("stop", 0), ("stop", 1)):
                points = STORE_POINTS if rank == 0 else STORE_POINTS[: STORE_POINTS.index("store.manifest")]
                yield from (Case(STORE, f"trainer-{rank}", point, act) for point in points)
            continue
        if transport in ("relay", "network"):
            acts = ("cut", "break") if transport == "relay" else ("cut",)
            yield from (Case(transport, "solo-0", point, act) for act in acts for point in alone)
            yield from (Case(transport, "solo-0", "round", act) for act in IMPAIRMENTS)
            continue
        for seed, kind in enumerate(CORRUPTIONS * 4, start=1):
            yield Case(transport, f"trainer-{seed % 2}", "trainer.placed", kind, seed)
        yield Case(transport, "trainer-0", "trainer.published", UNWIND)
        yield Case(transport, "solo-0", "engine.group", UNWIND)
        yield Case(transport, "trainer-1", "trainer.placed", ORPHAN)
        yield Case(transport, "duo-1", "engine.move", ORPHAN)
        for act in ("kill", "stop"):
            for party, points in (*parties.items(), ("coordinator", COORDINATOR_POINTS)):
                yield from (Case(transport, party, point, act) for point in points)


def _delta_cases() -> Iterator[Case]:
    """What is different where replicas read only what changed, before their pause, and can go back to the version before."""
    for seed in range(1, 5):
        yield Case(DELTAS, f"trainer-{seed % 2}", "trainer.placed", LISTS, seed)
        yield Case(DELTAS, f"duo-{seed % 2}", "engine.paused", STAGED, seed)
    for act in ("kill", "stop"):
        for point in DELTA_POINTS:
            yield Case(DELTAS, "coordinator" if point.startswith("round.") else "duo-1", point, act)
        yield from (Case(DELTAS, "trainer-1", point, act) for point in TRAINER_POINTS)
        yield from (Case(DELTAS, "duo-1", point, act) for point in ("engine.paused", "engine.moved", "engine.committed"))


def run_cases(stage: Stage, chosen: list[Case], found: Findings, say: Callable[[str], None]) -> None:
    """Run the cases of ``stage``'s transport, and note what goes wrong; if the stage cannot go on, the rest is not run."""
    warm_up(stage, found)
    before = {name: held(party.pid) for name, party in stage.parties.items()}
    for count, case in enumerate(chosen, start=1):
        say(f"{count}/{len(chosen)} {case.name}: {stage.tally.served:,} requests answered")
        try:
            _run(stage, case, found)
            stage.publish_well()
        except WeightSyncError as error:
            found.failed.append(f"{case.name}: {type(error).__name__}: {error}")
            say(f"FAILED {found.failed[-1]}")
            return
        finally:
            stage.set()
    look_for_leaks(stage, before, found)


def fork_mutant_is_caught(mutant: str, say: Callable[[str], None]) -> bool:
    """Return whether the cases of :data:`FORK_MUTANT_ACTS` notice ``mutant``."""
    forking = (case for case in cases(("shared_memory",)) if case.party.startswith("trainer"))
    chosen = [case for case in forking if case.act == FORK_MUTANT_ACTS[mutant]]
    tally, found = Tally(), Findings()
    with Stage("shared_memory", tally, mutant=mutant) as stage:
        run_cases(stage, chosen, found, lambda text: None)
    noticed = [*tally.notes, *found.hangs, *found.leaks, *found.failed]
    say(f"mutant: {mutant}: {noticed[0] if noticed else 'NOT NOTICED'}")
    return bool(noticed)


def warm_up(stage: Stage, found: Findings) -> None:
    """A round that succeeds and one that fails: threads that only failures need are there before anything is counted."""
    stage.publish_well()
    failing = (
        Case(stage.transport, "duo-1", "engine.paused", STAGED, 1)
        if stage.every > 1
        else Case(stage.transport, "trainer-0", "trainer.placed", "flip", 1)
    )
    _run(stage, failing, found)
    stage.set()
    stage.publish_well()


def spare_threads(party: str) -> int:
    """Threads that a party may have more than before, as they are made when they are first needed.

    At the coordinator that is asyncio's pool, at an engine rank the one thread for quarantines: a publication that cancels the
    re-seeding of a replica that has just joined needs it.
    """
    if party == "coordinator":
        return (os.cpu_count() or 1) + 4
    return 0 if party.startswith("trainer") else 1


def look_for_leaks(stage: Stage, before: dict[str, Held], found: Findings) -> None:
    """Note what the parties hold more than ``before``."""
    for name, party in stage.parties.items():
        # The end of a connection can be lost with the cable: then the other side notices by its keep-alive, within a minute.
        seconds = 5.0 if stage.network is None else 90.0
        found.leaks += [
            f"{stage.transport}: {name} {what}" for what in grown(before[name], party.pid, seconds, spare_threads(name))
        ]


def _run(stage: Stage, case: Case, found: Findings) -> None:
    if case.act in IMPAIRMENTS:
        _run_impaired(stage, case)
        return
    corrupting = case.act in CORRUPTIONS
    order = {"corrupt": case.act, "seed": case.seed} if corrupting else {}
    if "prepare" in case.point:
        _make_them_agree_anew(stage, case.party)
    if case.act == ORPHAN:
        _run_orphan(stage, case, found)
        return
    if case.act in (LISTS, STAGED):
        _run_flipped(stage, case, found)
        return
    if case.transport == STORE:
        _run_stored(stage, case)
        return
    trap = Trap(case.party, case.point, case.act, order)
    repairing = case.point in ENGINE_REPAIR_POINTS
    if repairing:  # only after a round that failed
        stage.set(trap, Trap("trainer-0", "trainer.placed", "flip", {"corrupt": "flip", "seed": 1}))
    elif case.point in _REVERT_POINTS:
        stage.set(trap, Trap("duo-0", "engine.paused", STAGED, {"corrupt": STAGED, "seed": 1}))
    else:
        stage.set(trap)
    timeout = 10.0 if corrupting else _DEADLINE
    number, asked = stage.publish(timeout)
    if not trap.sprung.wait(_REACHED):
        raise WeightSyncError(f"{case.party} never reached {case.point}: {stage.describe()}")
    if case.act == "kill" and case.party == "coordinator":
        stage.start(case.party)  # in the middle of the round that it ran
    late = _answers(case, asked, timeout, found)
    if corrupting:
        _nobody_took(stage, number, case, found)
    elif case.act == UNWIND:
        _make_them_agree_anew(stage, "solo-0")
        _reseeded(stage)  # from what is published, whatever the child did with it
    elif case.act == "cut":
        _network(stage).heal()
    elif case.act == "break":
        return  # whoever lost a connection makes another
    elif case.act == "stop":
        stage.parties[case.party].signal(signal.SIGCONT)
        for party in late:
            party.hear(_DEADLINE + 5 * _SLACK)
    elif case.party != "coordinator":
        stage.start(case.party)
        if not case.party.startswith("trainer") and not repairing:  # then there is nothing good to seed from
            _reseeded(stage)


def _network(stage: Stage) -> Network | Relay:
    if stage.network is None:
        raise WeightSyncError("this case needs a network of its own")
    return stage.network


def _run_impaired(stage: Stage, case: Case) -> None:
    """A slow or lossy network delays a round, and does nothing else."""
    network = _network(stage)
    network.impair(case.act)
    try:
        stage.publish_well(timeout=60.0)
    finally:
        network.heal()
    stage.injected["network"] += 1


def _run_flipped(stage: Stage, case: Case, found: Findings) -> None:
    """A wrong list is noticed before the pause, and all bytes are read; what goes wrong in the pause is undone."""
    trap = Trap(case.party, case.point, case.act, {"corrupt": case.act, "seed": case.seed})
    stage.set(trap)
    number, asked = stage.publish(_WELL)
    answers = [party.hear(_WELL + 5.0) for party in asked]
    if not trap.sprung.is_set():
        raise WeightSyncError(f"{case.party} never reached {case.point}: {stage.describe()}")
    if case.act == LISTS:
        wrong = stage.not_at(number, None)
    else:
        wrong = _not_gone_on(stage, number)
        found.went_on += not wrong
    if wrong:
        found.failed.append(f"{case.name}: {wrong}; {answers}")


def _run_stored(stage: Stage, case: Case) -> None:
    """A trainer rank does not get to the end of storing a version. Then both are gone, and all replicas come from the store."""
    trap = Trap(case.party, case.point, case.act)
    stage.set(trap)
    number, asked = stage.publish(_WELL)
    if not trap.sprung.wait(_REACHED):
        raise WeightSyncError(f"{case.party} never reached {case.point}: {stage.describe()}")
    for party in asked:
        if party.name != case.party:
            party.hear(_WELL + 5.0)
    if case.act == "stop":
        stage.parties[case.party].signal(signal.SIGCONT)
        stage.parties[case.party].hear(_WELL + 5.0)
        stage.wait_until(f"{number} is stored", lambda: _stored(stage) == number, _WELL)
    for party in asked:
        party.signal(signal.SIGKILL)
    engines = [name for name in stage.parties if name.startswith(("duo", "solo"))]
    for command in ("leave", "join"):
        for name in engines:
            stage.parties[name].tell(do=command)
        for name in engines:
            stage.parties[name].hear(_WELL)
    stored = _stored(stage)
    if not number - 1 <= stored <= number:
        raise WeightSyncError(f"after version {number}, version {stored} is stored")
    stage.wait_until(f"all serve version {stored} of the store", lambda: not stage.not_at(stored, None), _WELL)
    for party in asked:
        stage.start(party.name)


def _stored(stage: Stage) -> int:
    """Number of the version that the coordinator knows to be stored; -1 for none."""
    version = stage.status().stored
    return -1 if version is None else version.number


def _not_gone_on(stage: Stage, number: int) -> list[str]:
    """What is wrong with the first round of version ``number``, which one replica can undo, before it is seeded with it."""
    result = next(result for result in stage.status().rounds if result.version.number == number)
    states = {replica.name: (replica.state, replica.version) for replica in result.replicas}
    return [] if states == {"duo": ("loaded", number - 1), "solo": ("loaded", number)} else [str(states)]


def _run_orphan(stage: Stage, case: Case, found: Findings) -> None:
    """A party is killed, and a child that it forked lives on."""
    kind, _, rank = case.party.partition("-")
    with stage.client() as client, client.events() as events:
        trap = Trap(case.party, case.point, case.act)
        stage.set(trap)
        _, asked = stage.publish(_DEADLINE)
        if not trap.sprung.wait(_REACHED):
            raise WeightSyncError(f"{case.party} never reached {case.point}: {stage.describe()}")
        orphan = stage.orphans.pop()
        try:
            late = await_loss(events, f"{kind}/{rank}")
            found.hangs += [f"{case.name}: {late}"] if late else []
            _answers(case, asked, _DEADLINE, found)
        finally:
            found.leaks += [f"{case.name}: {what}" for what in kept(orphan)]
    stage.start(case.party)
    if kind != "trainer":
        _reseeded(stage)


def _make_them_agree_anew(stage: Stage, party: str) -> None:
    """Ranks prepare when something changed: so this one leaves and comes back."""
    for command in ("leave", "join"):
        stage.parties[party].tell(do=command)
        stage.parties[party].hear(20.0)


def _answers(case: Case, asked: list[Party], timeout: float, found: Findings) -> list[Party]:
    """Hear the trainer ranks that can answer, and note who took too long; those that are stopped, to be heard later."""
    later = []
    for party in asked:
        if party.name == case.party and case.act in ("kill", "stop", ORPHAN):
            later.append(party)
            continue
        try:
            answer = party.hear(timeout + 4 * _SLACK)
        except (DeadlineExceeded, PeerLost) as error:
            found.hangs.append(f"{case.name}: {error}")
            raise
        if answer["seconds"] > timeout + _SLACK:
            found.hangs.append(f"{case.name}: {party.name} had its answer after {answer['seconds']:.2f} s, not within {timeout:g}")
    return later if case.act == "stop" else []


def _reseeded(stage: Stage) -> None:
    """A replica whose rank is back holds the version of the regions again, without a publication."""
    with stage.client() as client:
        try:
            client.start_round(timeout=10.0)
        except (MembershipError, Aborted) as error:  # the coordinator may have been faster, by itself
            if "nothing to update" not in str(error) and "another round took precedence" not in str(error):
                raise
        status = client.status()
    if status.version is None:
        return  # the fault came before a version was placed: the next publication seeds
    wrong = stage.not_at(status.version.number, status.version.digest)
    if wrong:
        raise WeightSyncError(f"not re-seeded: {wrong}")


def _nobody_took(stage: Stage, number: int, case: Case, found: Findings) -> None:
    with stage.client() as client:
        for result in client.status().rounds:
            if result.version.number == number:
                took = [replica.name for replica in result.replicas if replica.state == "loaded" and replica.version == number]
                if took:
                    found.uncaught.append(f"{case.name}: {', '.join(took)} committed corrupted bytes")
                elif not all("VerificationError" in (replica.error or "") for replica in result.replicas):
                    found.failed.append(f"{case.name}: {msgspec.json.encode(result.replicas).decode()}")
