"""Updates from outside under faults: a real server and trainer, killed, stopped, late or lazy at every point of an update."""

from __future__ import annotations

import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from tests.faults import updated
from tests.faults.campaign import Case, Findings
from tests.faults.points import UPDATE_POINTS
from tests.faults.stage import Party, Tally
from tests.faults.weights import MANIFEST, NAMES

from weightsync.errors import DeadlineExceeded, PeerLost, WeightSyncError

__all__ = ["DISAGGREGATED", "MUTANT_CASES", "caught", "disaggregated_cases", "run_disaggregated"]

DISAGGREGATED = "disaggregated"
_TRAINER_LOST = (
    "rank.received.joingroup",
    "updates.begin",
    "rank.received.receive",
    "rank.arrived",
    "updates.commit",
    "rank.finish",
)
_DEADLINES = (1.5, 4.0, 10.0)  # seconds for an update that meets a fault
_SLACK = 11.0  # seconds after its deadline: a client waits so long for its own end of a collective that nobody aborts
_REACHED = 8.0
_SECONDS = 20.0
_FIRST, _REST = list(NAMES[: len(NAMES) // 2]), list(NAMES[len(NAMES) // 2 :])

LATE = {
    "late before commit": "rank.load",
    "late after verify": "rank.load",
    "late order": "rank.received.receive",
    "late broadcast": "rank.received.receive",
    "lazy loader": "rank.load",
}
"""Acts of their own, each with the point that it is about."""

MUTANT_CASES = {
    "a bucket's update is not compared": ("late before commit",),
    "what a loader took is not looked at": ("lazy loader",),
    "a closed group's bucket is taken": ("late broadcast",),
}
"""Which cases must notice which mutant."""


def disaggregated_cases() -> Iterator[Case]:
    """All of them, in the order in which they run."""
    for act, point in LATE.items():
        yield Case(DISAGGREGATED, "server", point, act)
    for act in ("kill", "stop"):
        yield from (Case(DISAGGREGATED, "server", point, act) for point in UPDATE_POINTS)
        yield from (Case(DISAGGREGATED, "trainer", point, act) for point in _TRAINER_LOST)


@dataclass
class _Trap:
    """What happens when the server comes to ``point`` for the next time."""

    point: str
    act: Callable[[], dict[str, Any]]
    sprung: threading.Event = field(default_factory=threading.Event)


class _Scene:
    """The server, the trainer, and what requests saw."""

    def __init__(self, tally: Tally, mutant: str | None = None) -> None:
        self.tally, self.number = tally, 0
        self.injected: Counter[str] = Counter()
        self.unclean: list[str] = []
        self._traps: list[_Trap] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port: int = listener.getsockname()[1]
        self._mutant = mutant
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", trust_env=False, timeout=_SECONDS)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="faults-requests")
        self.parties: dict[str, Party] = {}
        for name in ("server", "trainer"):
            self.start(name)

    def start(self, name: str) -> None:
        """Start a process, anew if it was killed."""
        old = self.parties.pop(name, None)
        if old is not None:
            old.end(0.0)
        if name == "server":
            config: dict[str, Any] = {"port": self._port, "bug": self._mutant, "answers": True}
            party = Party(name, updated.server, config, self)
        else:
            party = Party(name, updated.trainer, {"url": f"http://127.0.0.1:{self._port}"}, self)
        self.parties[name] = party
        party.hear(60.0)

    def at(self, party: Party, point: str) -> dict[str, Any]:
        """The server reached a point."""
        for trap in self._traps:
            if trap.point == point and not trap.sprung.is_set():
                order = trap.act()
                trap.sprung.set()
                return order
        return {}

    def forked(self, party: Party, child: int) -> dict[str, Any]:
        """Nobody is told to fork here."""
        raise WeightSyncError(f"{party.name} forked process {child}")

    def lay(self, point: str, act: Callable[[], dict[str, Any]]) -> _Trap:
        """Lay a trap; :meth:`clear` takes all away."""
        trap = _Trap(point, act)
        self._traps.append(trap)
        return trap

    def hold(self, point: str, threads: int = 1) -> Callable[[], None]:
        """Stop the next threads of the server that come there, until :meth:`release`; wait for them with what is returned."""
        return self._wait_for(point, [self.lay(point, lambda: {"hold": point}) for _ in range(threads)])

    def note(self, point: str, threads: int = 1) -> Callable[[], None]:
        """What is returned waits until so many threads have come there."""
        return self._wait_for(point, [self.lay(point, dict) for _ in range(threads)])

    def _wait_for(self, point: str, traps: list[_Trap]) -> Callable[[], None]:
        def wait() -> None:
            if not all(trap.sprung.wait(_REACHED) for trap in traps):
                raise WeightSyncError(f"the server never reached {point}")

        return wait

    def release(self, point: str) -> None:
        """Let it go on."""
        self.command("server", do="release", point=point)

    def clear(self) -> None:
        """Take all traps away."""
        self._traps.clear()

    def signal(self, name: str, number: int, kind: str) -> Callable[[], dict[str, Any]]:
        """An act: send a signal to a process."""

        def act() -> dict[str, Any]:
            self.parties[name].signal(number)
            self.injected[kind] += 1
            return {}

        return act

    def command(self, name: str, **command: object) -> dict[str, Any]:
        """Tell a process to do something, and hear how it went."""
        self.parties[name].tell(**command)
        return self.parties[name].hear(_SECONDS)

    def post(self, path: str, **body: object) -> tuple[bool, str]:
        """Ask the server; whether it did, and what it said."""
        answer = self._http.post(path, json=body)
        found = answer.json()
        return found["success"], found["message"]

    def must(self, path: str, **body: object) -> None:
        """Ask for what must succeed."""
        good, message = self.post(path, **body)
        if not good:
            raise WeightSyncError(f"{path}: {message}")

    def send(self, group: str, number: int, names: list[str]) -> None:
        """One bucket that must arrive."""
        asked = self.ask_for(group, names)
        answer = self.command("trainer", do="broadcast", group=group, number=number, names=names)
        good, message = asked.result(_SECONDS)
        if not good or answer["error"]:
            raise WeightSyncError(f"a bucket of {number}: {message}, {answer['error']}")

    def ask_for(self, group: str, names: list[str]) -> Future[tuple[bool, str]]:
        """The request of a bucket, without its broadcast."""
        specs = [spec for spec in MANIFEST if spec.name in names]
        return self._threads.submit(
            self.post, "/update_weights_from_distributed", group_name=group, names=[spec.name for spec in specs],
            dtypes=[spec.dtype for spec in specs], shapes=[list(spec.shape) for spec in specs], load_format="flattened_bucket",
        )  # fmt: skip

    def update_well(self) -> None:
        """Whatever happened: all is given up, and an update of everything succeeds and is served."""
        state = self._http.get("/weight_update").json()
        if state["state"] == "updating":
            self.post("/abort_weight_update")
        for name in state["groups"]:
            self.post("/destroy_weights_update_group", group_name=name)
        self.number += 1
        answer = self.command("trainer", do="update", number=self.number, timeout=8.0)
        state = self._http.get("/weight_update").json()
        if answer["error"] or state["state"] != "serving" or state["weight_version"] != f"disaggregated@{self.number}":
            raise WeightSyncError(f"update {self.number}: {answer['error']}; the server is {state}")

    def close(self) -> None:
        """End both processes."""
        self.clear()
        for name in list(self.parties):
            if not self.parties.pop(name).end(10.0):
                self.unclean.append(name)
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def run_disaggregated(
    chosen: list[Case], tally: Tally, found: Findings, say: Callable[[str], None], mutant: str | None = None
) -> Counter[str]:
    """Run the cases, with ``mutant`` planted if there is one, and note what goes wrong; faults by kind."""
    with _Scene(tally, mutant) as scene:
        try:
            scene.update_well()
            for count, case in enumerate(chosen, start=1):
                say(f"{count}/{len(chosen)} {case.name}: {tally.served:,} requests answered")
                _run(scene, case, found)
                scene.update_well()
        except (WeightSyncError, httpx.HTTPError) as error:
            found.failed.append(f"{case.name if scene.number > 1 else DISAGGREGATED}: {type(error).__name__}: {error}")
            say(f"FAILED {found.failed[-1]}")
    found.leaks += [f"{DISAGGREGATED}: {name} did not end when asked to" for name in scene.unclean]
    return scene.injected


def caught(mutant: str, say: Callable[[str], None]) -> bool:
    """Whether the cases that must notice ``mutant`` do."""
    tally, found = Tally(), Findings()
    chosen = [case for case in disaggregated_cases() if case.act in MUTANT_CASES[mutant]]
    run_disaggregated(chosen, tally, found, lambda text: None, mutant)
    noticed = [*tally.notes, *found.hangs, *found.failed]
    say(f"mutant: {mutant}: {noticed[0] if noticed else 'NOT NOTICED'}")
    return bool(noticed)


def _run(scene: _Scene, case: Case, found: Findings) -> None:
    try:
        if case.act in LATE:
            _ACTS[case.act](scene)
            scene.injected["late"] += 1
        else:
            _struck(scene, case, found)
    finally:
        scene.clear()


def _struck(scene: _Scene, case: Case, found: Findings) -> None:
    """Kill or stop a party while an update is at a point, and look that it ends."""
    deadline = _strike(scene, case)
    if case.act == "kill":
        scene.start(case.party)
    if (case.party, case.act) == ("trainer", "kill"):
        return
    try:
        if case.act == "stop":
            with suppress(DeadlineExceeded):  # beyond its own deadline and the server's: what goes on after that is late
                scene.parties["trainer"].hear(deadline + 0.5)
                return
            scene.parties[case.party].signal(signal.SIGCONT)
        answer = scene.parties["trainer"].hear(deadline + _SLACK)
    except (DeadlineExceeded, PeerLost) as error:
        found.hangs.append(f"{case.name}: {error}")
        raise
    finally:
        scene.parties[case.party].signal(signal.SIGCONT)
    if answer["seconds"] > deadline + _SLACK:
        found.hangs.append(f"{case.name}: the trainer had its answer after {answer['seconds']:.2f} s")


def _strike(scene: _Scene, case: Case) -> float:
    """Begin an update and strike when it is at the point; the update's deadline, longer where a busy machine never came so far."""
    number = signal.SIGKILL if case.act == "kill" else signal.SIGSTOP
    for deadline in _DEADLINES:
        trap = scene.lay(case.point, scene.signal(case.party, number, case.act))
        scene.number += 1
        scene.parties["trainer"].tell(do="update", number=scene.number, timeout=deadline)
        if trap.sprung.wait(deadline + 0.5):
            return deadline
        scene.clear()
        if trap.sprung.is_set():  # in this very moment
            return deadline
        scene.parties["trainer"].hear(deadline + _SLACK)
        scene.update_well()
    raise WeightSyncError(f"the server never reached {case.point}")


def _late_into_the_next(scene: _Scene, release: Callable[[int], None]) -> None:
    """A bucket is late at a rank, so is the order to leave its group; its update is aborted, and another one committed."""
    old, new = scene.number + 1, scene.number + 2
    scene.number = new
    for group in ("old", "new"):
        scene.command("trainer", do="join", group=group)
    scene.must("/begin_weight_update", weight_version=str(old))
    held, leaving = scene.hold("rank.load", updated.RANKS), scene.hold("rank.received.leavegroup", updated.RANKS)
    scene.hold("rank.received.leavegroup", updated.RANKS)  # the front orders it once more when the bucket has timed out
    late = scene.ask_for("old", _FIRST)
    scene.command("trainer", do="broadcast", group="old", number=old, names=_FIRST)
    held()
    scene.post("/destroy_weights_update_group", group_name="old")
    leaving()
    scene.post("/abort_weight_update")
    scene.must("/begin_weight_update", weight_version=str(new))
    for names in (_FIRST, _REST):
        scene.send("new", new, names)
    release(new)
    scene.release("rank.received.leavegroup")
    late.result(_SECONDS)
    scene.command("trainer", do="leave", group="old")


def _late_before_commit(scene: _Scene) -> None:
    def release(number: int) -> None:
        answered = scene.note("rank.answer", updated.RANKS)
        scene.release("rank.load")
        answered()
        scene.must("/commit_weight_update")

    _late_into_the_next(scene, release)


def _late_after_verify(scene: _Scene) -> None:
    def release(number: int) -> None:
        scene.lay("updates.verified", lambda: {"release": "rank.load"})
        scene.must("/commit_weight_update")

    _late_into_the_next(scene, release)


def _late_order(scene: _Scene) -> None:
    """An order to receive reaches its rank when its group was left, and another one has that name."""
    old, new = scene.number + 1, scene.number + 2
    scene.number = new
    scene.command("trainer", do="join", group="same")
    scene.must("/begin_weight_update", weight_version=str(old))
    held = scene.hold("rank.received.receive")
    late = scene.ask_for("same", _FIRST)
    held()
    scene.must("/destroy_weights_update_group", group_name="same")
    scene.post("/abort_weight_update")
    scene.command("trainer", do="leave", group="same")
    scene.command("trainer", do="join", group="same")
    scene.must("/begin_weight_update", weight_version=str(new))
    answered = scene.lay("rank.answer", dict)
    scene.release("rank.received.receive")
    answered.sprung.wait(1.0)  # with a bug it is not answered, but takes the next broadcast
    for names in (_REST, _FIRST):
        scene.send("same", new, names)
    scene.must("/commit_weight_update")
    late.result(_SECONDS)


def _late_broadcast(scene: _Scene) -> None:
    """Bytes of an older version come over a group that was destroyed, after the update got the same tensors by another."""
    old, new = scene.number, scene.number + 1
    scene.number = new
    for group in ("old", "new"):
        scene.command("trainer", do="join", group=group)
    scene.must("/begin_weight_update", weight_version=str(new))
    waiting = scene.note("rank.received.receive", updated.RANKS)
    late = scene.ask_for("old", _FIRST)
    waiting()
    scene.must("/destroy_weights_update_group", group_name="old")
    for names in (_FIRST, _REST):
        scene.send("new", new, names)
    scene.command("trainer", do="broadcast", group="old", number=old, names=_FIRST)
    late.result(_SECONDS)
    scene.post("/commit_weight_update")  # the update has failed with that bucket, and must not be served
    scene.command("trainer", do="leave", group="old")


def _lazy_loader(scene: _Scene) -> None:
    """A loader that takes nothing of what it is handed: the digest of what was handed over would be right."""
    scene.number += 1
    scene.command("server", do="be", lazy=True)
    answer = scene.command("trainer", do="update", number=scene.number, timeout=_DEADLINES[-1])
    scene.command("server", do="be", lazy=False)
    if not answer["error"]:
        scene.injected["unnoticed"] += 1
        raise WeightSyncError("an update of which nothing was loaded was committed")


_ACTS: dict[str, Callable[[_Scene], None]] = {
    "late before commit": _late_before_commit,
    "late after verify": _late_after_verify,
    "late order": _late_order,
    "late broadcast": _late_broadcast,
    "lazy loader": _lazy_loader,
}
