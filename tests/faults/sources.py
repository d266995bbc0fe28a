"""Replicas that feed replicas, under faults: a source killed, stopped, updated, quarantined or lied to while another reads from it.

The trainer is gone when a replica joins late, so it reads from another replica, and there is a third one in reserve. Whatever
happens to the source, the joiner must serve the version in the end, and nobody may serve anything else meanwhile.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tests.faults.campaign import Case, Findings, look_for_leaks
from tests.faults.leaks import held
from tests.faults.points import SOURCE_POINTS
from tests.faults.stage import ROUND_SECONDS, Stage, Tally, Trap

from weightsync.coordinator.events import ReplicaEnded, ReplicaPhase
from weightsync.errors import WeightSyncError

__all__ = ["MUTANT_ACTS", "SOURCE_TRANSPORTS", "run_sources", "source_cases", "source_mutant_is_caught"]

SOURCE_TRANSPORTS = ("shared_memory", "tcp", "nixl")
_SLACK = 2.0
_REACHED = 10.0
_SOURCE, _JOINERS = "duo-1", ("solo-0", "spare-0")  # written by its loader, and directly
_LIES = ("flip", "drop")
_STRIKES = ("kill", "stop", "taken", "quarantined")
_READING = ("engine.move", "engine.group")
MUTANT_ACTS = {
    "what was read from a replica is not compared": "source flip",
    "a source that hangs gets the whole round": "source stop",
    "a source that lied is offered again": "source flip",
}
"""Which cases must notice which mutant."""


def source_cases(transports: tuple[str, ...] = SOURCE_TRANSPORTS) -> Iterator[Case]:
    """All of them, in the order in which they run. ``party`` is who comes to ``point``; it is always the source that is struck.

    What has nothing to do with how bytes cross is looked at over one transport only.
    """
    for transport in transports:
        whole = transport == "shared_memory"
        for number, lie in enumerate(_LIES if whole else _LIES[:1], start=1):
            yield Case(transport, _SOURCE, "engine.placed", f"source {lie}", number)
        for act in ("kill", "stop"):
            yield from (
                Case(transport, _SOURCE, point, f"source {act}") for point in (SOURCE_POINTS if whole else ("engine.placed",))
            )
        for number, act in enumerate(_STRIKES):
            for point in _READING if whole else ("engine.group",):
                yield Case(transport, _JOINERS[number % 2 if point == "engine.group" else 1 - number % 2], point, f"source {act}")
        yield Case(transport, _JOINERS[0], "engine.group", "source updated")
        yield Case(transport, _JOINERS[0], "engine.group", "reader kill")
        if transport != "nixl":
            yield from (Case(transport, "*", "engine.placed", f"wave {act}") for act in ("kill", "stop"))


def run_sources(
    transport: str, chosen: list[Case], tally: Tally, found: Findings, say: Callable[[str], None], mutant: str = ""
) -> Counter[str]:
    """Run the cases of ``transport``, with ``mutant`` planted if there is one, and note what goes wrong.

    If a stage cannot go on, the rest of its cases is not run.

    Returns:
        The faults by kind.
    """
    injected = Counter[str]()
    for waves in (False, True):
        mine = [case for case in chosen if case.act.startswith("wave") is waves]
        if mine:
            with Stage(transport, tally, mutant=mutant, sources=True, fan_out=1 if waves else None) as stage:
                try:
                    _run_all(stage, mine, found, say)
                except WeightSyncError as error:
                    found.failed.append(f"{transport}, sources: {type(error).__name__}: {error}")
            injected += stage.injected
            found.leaks += [f"{transport}, sources: {name} did not end when asked to" for name in stage.unclean]
    return injected


def _run_all(stage: Stage, chosen: list[Case], found: Findings, say: Callable[[str], None]) -> None:
    stage.publish_well()
    _trainers(stage, "leave")
    for joiner in _JOINERS:
        _late_joiner(stage, joiner)
    _trainers(stage, "join")
    stage.publish_well()
    before = {name: held(party.pid) for name, party in stage.parties.items()}
    for count, case in enumerate(chosen, start=1):
        say(f"{count}/{len(chosen)} {case.name}: {stage.tally.served:,} requests answered")
        try:
            _run(stage, case, found)
            stage.set()
            stage.publish_well()
        except WeightSyncError as error:
            found.failed.append(f"{case.name}: {type(error).__name__}: {error}; {stage.describe()}")
            say(f"FAILED {found.failed[-1]}")
            return
        finally:
            stage.set()
    look_for_leaks(stage, before, found)


def _run(stage: Stage, case: Case, found: Findings) -> None:
    whom, _, act = case.act.partition(" ")
    if whom == "wave":
        _wave(stage, case, act, found)
        return
    joiner = _JOINERS[case.seed % 2] if case.party == _SOURCE else case.party
    _trainers(stage, "leave")
    _command(stage, joiner, "leave")
    number, digest = stage.version, stage.digest
    trap = _trap(stage, case, joiner if whom == "reader" else _SOURCE, act)
    stage.set(trap)
    stage.parties[joiner].tell(do="join")
    if whom == "source":
        stage.parties[joiner].hear(_REACHED)
    if not trap.sprung.wait(_REACHED):
        raise WeightSyncError(f"{case.party} never reached {case.point}")
    if act == "updated":
        _trainers_answer(stage, case, found)
        return
    if whom == "reader":
        _recover(stage, joiner, act)
    else:
        name, started = joiner.partition("-")[0], time.monotonic()
        stage.wait_until(f"{name} serves {number}", lambda: not stage.not_at(number, digest, name), ROUND_SECONDS + _SLACK)
        if time.monotonic() - started > ROUND_SECONDS + _SLACK:
            found.hangs.append(f"{case.name}: {name} was seeded after {time.monotonic() - started:.2f} s")
        if act in _LIES:
            _offered_again(stage, case, joiner, found)
        _recover(stage, _SOURCE, act)
    if act not in ("taken", "quarantined"):  # of which the coordinator knows nothing before the next publication
        stage.wait_until("all serve it", lambda: not stage.not_at(number, digest), 2 * ROUND_SECONDS)
    _trainers(stage, "join")


def _trap(stage: Stage, case: Case, victim: str, act: str) -> Trap:
    if act in _LIES:
        return Trap(case.party, case.point, act, {"corrupt": act, "seed": case.seed})
    if act == "updated":
        return Trap(case.party, case.point, act, strike=lambda: _publish_meanwhile(stage))
    if act in ("taken", "quarantined"):
        return Trap(case.party, case.point, act, strike=lambda: _command(stage, victim, act))
    return Trap(case.party, case.point, act, victim=victim)


def _publish_meanwhile(stage: Stage) -> None:
    """The trainer comes back, publishes, and the source is updated."""
    _trainers(stage, "join")
    stage.publish(ROUND_SECONDS)
    stage.injected["update"] += 1


def _trainers_answer(stage: Stage, case: Case, found: Findings) -> None:
    answers = [party.hear(ROUND_SECONDS + _SLACK) for party in stage.trainers]
    if any(answer["error"] for answer in answers):
        found.failed.append(f"{case.name}: {[answer['error'] for answer in answers]}")
    found.hangs += [f"{case.name}: {answer['seconds']:.2f} s" for answer in answers if answer["seconds"] > ROUND_SECONDS + 1.0]


def _offered_again(stage: Stage, case: Case, joiner: str, found: Findings) -> None:
    """Whoever joins next is not given the source that lied."""
    other = next(name for name in _JOINERS if name != joiner)
    name, number, digest = other.partition("-")[0], stage.version, stage.digest
    with stage.client() as client, client.events() as events:
        _command(stage, other, "leave")
        _command(stage, other, "join")
        for event in events:
            if isinstance(event, ReplicaPhase) and (event.replica, event.phase) == (name, "quarantine"):
                found.uncaught.append(f"{case.name}: {name} was given the source that had lied")
            if isinstance(event, ReplicaEnded) and event.result.name == name:
                break
    stage.wait_until(f"{name} serves it", lambda: not stage.not_at(number, digest, name), ROUND_SECONDS + _SLACK)


def _wave(stage: Stage, case: Case, act: str, found: Findings) -> None:
    """Whichever replica feeds another during a publication is struck."""
    trap = Trap("*", case.point, act)
    stage.set(trap)
    number, asked = stage.publish(ROUND_SECONDS)
    for party in asked:
        answer = party.hear(ROUND_SECONDS + _SLACK)
        if answer["seconds"] > ROUND_SECONDS + 1.0:
            found.hangs.append(f"{case.name}: {party.name} had its answer after {answer['seconds']:.2f} s")
    if not trap.struck:
        raise WeightSyncError("no replica fed another")
    source = trap.struck.partition("-")[0]
    wrong = [line for name in ("duo", "solo", "spare") if name != source for line in stage.not_at(number, None, name)]
    if wrong:
        found.failed.append(f"{case.name}: {wrong}")
    _recover(stage, trap.struck, act)


def _recover(stage: Stage, name: str, act: str) -> None:
    if act == "kill":
        stage.start(name)
    elif act == "stop":
        stage.parties[name].signal(signal.SIGCONT)


def _late_joiner(stage: Stage, joiner: str) -> None:
    """A replica leaves and is seeded by another: what that needs is there before anything is counted."""
    number, digest, name = stage.version, stage.digest, joiner.partition("-")[0]
    _command(stage, joiner, "leave")
    _command(stage, joiner, "join")
    stage.wait_until(f"{name} is seeded", lambda: not stage.not_at(number, digest, name), ROUND_SECONDS + _SLACK)


def _trainers(stage: Stage, what: str) -> None:
    for party in stage.trainers:
        _command(stage, party.name, what)


def _command(stage: Stage, name: str, what: str) -> None:
    stage.parties[name].tell(do=what)
    stage.parties[name].hear(_REACHED)
    if what in ("taken", "quarantined"):
        stage.injected[what] += 1


def source_mutant_is_caught(mutant: str, say: Callable[[str], None]) -> bool:
    """Return whether the cases that must notice ``mutant`` do."""
    chosen = [case for case in source_cases(("shared_memory",)) if case.act == MUTANT_ACTS[mutant]][:1]
    tally, found = Tally(), Findings()
    run_sources("shared_memory", chosen, tally, found, lambda text: None, mutant)
    noticed = [*tally.notes, *found.hangs, *found.uncaught, *found.failed]
    say(f"mutant: {mutant}: {noticed[0] if noticed else 'NOT NOTICED'}")
    return bool(noticed)
