"""What a round costs besides its bytes: real agents over real sockets, sixteen bytes of weights.

``python -m benchmarks.control [--only CASE] [--rounds N] [--json]`` measures, each case beside its goal:

* ``round/N``: ``Trainer.publish`` to N replicas of one rank each, from call to result; the median of several after one that plans;
* ``notice/killed``: from SIGKILL of an engine's process to the coordinator's event that it left;
* ``join/others-paused``: how long replicas that serve are paused while one joins and is seeded. They are not, so it is zero;
* ``completion/push``: see :mod:`benchmarks.completions`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.completions import CompletionCase, completion_push_case
from benchmarks.control_floor import EXCHANGES, floor_seconds
from benchmarks.control_rank import NAME
from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.coordinator.events import Joined, Left, ReplicaEnded, ReplicaPhase
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, RoundFailed
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer
from weightsync_bench.peer import Peer
from weightsync_bench.report import machine, print_json

__all__ = ["CONTROL_CASES", "ControlCase", "main", "run_control_cases"]

_PROCESSES = 4
_ATTEMPTS = 10
_GOALS = {8: 0.015, 256: 0.150, 1024: 0.600}
"""Seconds; the last one is the second, grown linearly."""

CONTROL_CASES = (*(f"round/{count}" for count in _GOALS), "notice/killed", "join/others-paused", "completion/push")


class ControlCase(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement beside its goal."""

    name: str
    seconds: float
    goal_seconds: float
    agents: int
    rounds: int
    phases: dict[str, float] = {}
    """Medians over the rounds of what the coordinator says of them."""
    floor: str = ""
    floor_seconds: float = 0.0


class _Fleet:
    """A coordinator in this process's thread, one trainer rank, and engine ranks in a few processes."""

    def __init__(self, count: int, owned: ExitStack) -> None:
        self._owned = owned
        server = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))
        self._config = {"coordinator": server.url, "token": server.token}
        self._settings = ClientSettings(coordinator=server.address, token=Secret(server.token))
        self.state = {NAME: torch.zeros(4)}
        self.trainer = owned.enter_context(Trainer(self.state, server.url, token=server.token, rank=0, world_size=1))
        processes = min(_PROCESSES, count)
        self.peers = [self.start(f"engines{part}", count // processes) for part in range(processes)]
        for peer in self.peers:
            peer.hear(180)
        self._number = 0

    def start(self, role: str, count: int) -> Peer:
        """One more process with ``count`` replicas; :meth:`Peer.hear` it before use."""
        config = {**self._config, "role": role, "rank": 0, "count": count}
        return self._owned.enter_context(Peer("benchmarks.control_rank", config, {"OMP_NUM_THREADS": "1"}))

    def client(self) -> Client:
        """A client of the coordinator; close it."""
        return Client(self._settings)

    def connect(self, replicas: int) -> None:
        """Publish until so many replicas take part. Readers that come all at once may be sent away once by the trainer's door."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                self.publish(replicas)
                return
            except RoundFailed:
                if not left:
                    raise

    def publish(self, replicas: int) -> tuple[float, dict[str, float]]:
        """One round to exactly so many replicas: seconds as the trainer sees them, and by phase."""
        self._number += 1
        self.state[NAME].fill_(self._number)
        started = time.perf_counter()
        result = self.trainer.publish(self._number, timeout=60)
        seconds = time.perf_counter() - started
        reached = sum(replica.error is None for replica in result.replicas)
        if reached != replicas:
            raise RoundFailed(f"{reached} of {replicas} replicas got version {self._number}: {result.error}")
        phases = {**result.phases, "coordinator": result.seconds}
        for phase in result.replicas[0].phases:
            phases[phase] = statistics.median(replica.phases[phase] for replica in result.replicas)
        return seconds, phases


def _round(count: int, rounds: int) -> ControlCase:
    with ExitStack() as owned:
        fleet = _Fleet(count, owned)
        fleet.connect(count)
        measured = [fleet.publish(count) for _ in range(rounds)]
    phases = {phase: statistics.median(one[phase] for _, one in measured) for phase in measured[0][1]}
    seconds = statistics.median(seconds for seconds, _ in measured)
    return ControlCase(
        name=f"round/{count}",
        seconds=seconds,
        goal_seconds=_GOALS[count],
        agents=count,
        rounds=rounds,
        phases=phases,
        floor=f"{EXCHANGES} bare WebSocket messages to each agent, and back",
        floor_seconds=floor_seconds(count, min(_PROCESSES, count), rounds),
    )


def _killed(rounds: int) -> ControlCase:
    taken = []
    with ExitStack() as owned:
        fleet = _Fleet(4, owned)
        for attempt in range(rounds):
            victim = fleet.start(f"victim{attempt}", 1)
            victim.hear(60)
            with fleet.client() as client, client.events() as events:
                client.status()  # the stream is open
                started = time.perf_counter()
                os.killpg(victim.pid, signal.SIGKILL)
                deadline = Deadline(30.0)
                for event in events:
                    deadline.remaining("the coordinator noticing a killed agent")
                    if isinstance(event, Left):
                        taken.append(time.perf_counter() - started)
                        break
    seconds = statistics.median(taken)
    return ControlCase(name="notice/killed", seconds=seconds, goal_seconds=0.1, agents=5, rounds=rounds)


def _joined(rounds: int) -> ControlCase:
    """The longest that any replica which served was between pause and resume while others joined."""
    with ExitStack() as owned:
        fleet = _Fleet(4, owned)
        fleet.publish(4)
        disturbed = 0.0
        for attempt in range(rounds):
            name = f"late-{attempt}"
            with fleet.client() as client, client.events() as events:
                fleet.peers[0].tell(do="join", name=name)
                deadline = Deadline(30.0)
                paused: dict[str, float] = {}
                for event in events:
                    deadline.remaining("seeding a replica that joined")
                    if isinstance(event, Joined):
                        continue
                    if isinstance(event, ReplicaPhase) and event.replica != name:
                        paused.setdefault(event.replica, time.perf_counter())
                    if isinstance(event, ReplicaEnded):
                        if event.result.name == name:
                            break
                        disturbed = max(disturbed, time.perf_counter() - paused.get(event.result.name, time.perf_counter()))
                fleet.peers[0].hear(30)
        return ControlCase(name="join/others-paused", seconds=disturbed, goal_seconds=0.0, agents=4, rounds=rounds)


def run_control_cases(only: Sequence[str], rounds: int, note: Callable[[str], None]) -> list[ControlCase | CompletionCase]:
    """Run the cases of :data:`CONTROL_CASES` whose name contains one of ``only`` (none: all).

    Raises :class:`~weightsync.errors.ConfigurationError` if no case does, and what a round that fails raises.
    """
    chosen = [name for name in CONTROL_CASES if not only or any(part in name for part in only)]
    if not chosen:
        raise ConfigurationError(f"no case matches; the cases are {', '.join(CONTROL_CASES)}")
    cases: list[ControlCase | CompletionCase] = []
    for name in chosen:
        note(f"{name}: measuring")
        kind, _, what = name.partition("/")
        if kind == "round":
            cases.append(_round(int(what), rounds))
        elif kind == "notice":
            cases.append(_killed(rounds))
        elif kind == "join":
            cases.append(_joined(rounds))
        else:
            cases.append(completion_push_case())
    return cases


def main(arguments: Sequence[str]) -> int:
    """Run the cases; a table and progress go to standard error, the JSON (if asked for) is standard output's last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control")
    parser.add_argument("--only", action="append", default=[], help="only cases whose name contains this; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args(arguments)
    console = Console(stderr=True)
    cases = run_control_cases(wanted.only, wanted.rounds, lambda text: console.print(text, style="dim", highlight=False))
    table = Table(title="control alone: no bytes to speak of")
    table.add_column("case", no_wrap=True)
    for heading in ("ms", "goal ms"):
        table.add_column(heading, justify="right")
    for case in cases:
        style = "" if case.seconds <= case.goal_seconds else "yellow"
        table.add_row(case.name, f"{case.seconds * 1000:.1f}", f"{case.goal_seconds * 1000:.0f}", style=style)
    console.print(table)
    if wanted.json:
        print_json(cases, machine())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
