"""The processes of a campaign: started, watched, killed, stopped, started again, and in the end all gone."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
from tests.faults import parties
from tests.faults.forked import ORPHAN, UNWIND
from tests.faults.network import Network
from tests.faults.relay import Relay

from weightsync.config import Address, ClientSettings, Secret, Timeouts
from weightsync.coordinator.events import Joined
from weightsync.coordinator.status import Status
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, PeerLost, WeightSyncError
from weightsync.server.client import Client

__all__ = ["ROUND_SECONDS", "Party", "Stage", "Tally", "Trap", "Watching"]

_START_SECONDS = 60.0
_END_SECONDS = 10.0
ROUND_SECONDS = 6.0
"""Most that a round takes where replicas feed replicas: a reader gives a source that hangs half of it."""
_PACE = 0.004  # seconds between two requests to one engine rank

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.parties"])


@dataclass
class Tally:
    """What requests saw, in all processes together."""

    served: int = 0
    torn: int = 0
    mislabelled: int = 0
    notes: list[str] = field(default_factory=list)

    def take(self, name: str, answer: dict[str, Any]) -> None:
        """Check one answer."""
        label, versions = answer["label"], answer["versions"]
        if label is None:
            return
        self.served += 1
        if len(versions) != 1 or versions[0] < 0:
            self.torn += 1
            self.notes.append(f"{name} answered as version {label} from weights of {versions}")
        elif versions[0] != label:
            self.mislabelled += 1
            self.notes.append(f"{name} answered as version {label} from weights of version {versions[0]}")


@dataclass
class Trap:
    """What is to happen when ``party`` reaches ``point`` for the next time: ``kill``, ``stop``, or an order to carry out."""

    party: str
    point: str
    act: str
    order: dict[str, Any] = field(default_factory=dict)
    victim: str = ""
    """Whom it happens to, if not to ``party`` (``*``: whoever comes there first)."""
    strike: Callable[[], None] | None = None
    """What is to happen instead, before the party goes on."""
    struck: str = ""
    """Whom it has happened to."""
    sprung: threading.Event = field(default_factory=threading.Event)


class Watching(Protocol):
    """Whose party a process is."""

    tally: Tally

    def at(self, party: Party, point: str) -> dict[str, Any]:
        """A process reached a point: what it is to do before it goes on."""
        ...

    def forked(self, party: Party, child: int) -> dict[str, Any]:
        """A process forked, since it was told to."""
        ...


class Party:
    """One process and its three sockets."""

    def __init__(self, name: str, target: Callable[..., None], config: dict[str, Any], stage: Watching) -> None:
        self.name, self.config, self._stage = name, config, stage
        pairs = [socket.socketpair() for _ in range(3)]
        self._ends = [pair[0] for pair in pairs]
        theirs = tuple(pair[1] for pair in pairs)
        self.process: ForkServerProcess = _context.Process(
            target=parties.run, args=(target, theirs, config), name=name, daemon=True
        )
        self.process.start()
        for end in theirs:
            end.close()
        commands, gate, requests = self._ends
        self._commands = commands
        self._answers = commands.makefile("rb")
        self._closed = threading.Event()
        watching: list[Callable[[], None]] = [lambda: self._watch(gate)]
        if config.get("answers", target is parties.engine):
            watching.append(lambda: self._ask(requests))
        self._threads = [threading.Thread(target=work, name=f"{name}-watch", daemon=True) for work in watching]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid or 0

    def tell(self, **command: object) -> None:
        """Send a command; :meth:`hear` has the answer."""
        with suppress(OSError):
            self._commands.sendall(msgspec.json.encode(command) + b"\n")

    def hear(self, timeout: float) -> dict[str, Any]:
        """The next answer.

        Raises :class:`~weightsync.errors.PeerLost` if the process ended and :class:`~weightsync.errors.DeadlineExceeded` if it is
        silent.
        """
        self._commands.settimeout(timeout)
        try:
            line = self._answers.readline()
        except TimeoutError:
            self._answers = self._commands.makefile("rb")  # a stream that timed out once cannot be read again
            raise DeadlineExceeded(f"{self.name} did not answer within {timeout:g} s") from None
        except OSError:
            line = b""
        if not line:
            raise PeerLost(f"{self.name} ended")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    def _watch(self, gate: socket.socket) -> None:
        with suppress(OSError), gate.makefile("rb") as stream:
            for line in stream:
                said = msgspec.json.decode(line)
                order = self._stage.forked(self, said["forked"]) if "forked" in said else self._stage.at(self, said["point"])
                gate.sendall(msgspec.json.encode(order) + b"\n")

    def _ask(self, requests: socket.socket) -> None:
        with suppress(OSError), requests.makefile("rb") as stream:
            while not self._closed.wait(_PACE):
                requests.sendall(b"{}\n")
                line = stream.readline()
                if not line:
                    return
                self._stage.tally.take(self.name, msgspec.json.decode(line))

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, timeout: float) -> bool:
        """Close the sockets, so that the process ends by itself; whether it did within ``timeout`` seconds. It is gone after."""
        self._closed.set()
        for number in (signal.SIGCONT, signal.SIGTERM) if "port" in self.config else (signal.SIGCONT,):
            self.signal(number)
        commands, gate, requests = self._ends
        for end in (commands, requests):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.process.join(timeout)
        orderly = not self.process.is_alive()
        if not orderly:
            self.process.kill()
            self.process.join(10.0)
        with suppress(OSError):
            gate.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10.0)
        self._answers.close()
        for end in self._ends:
            end.close()
        self.process.close()
        return orderly


class Stage:
    """A coordinator, two trainer ranks, a replica of two ranks written directly, and one of one rank that is streamed to.

    With a ``network``, the last one is at its other end; with a relay, all engine ranks are. With ``sources`` all replicas serve
    their weights to others, each to ``fan_out`` at a time, and there is a third one, of one rank, that is written directly. A
    version changes one of ``every`` elements; if that is not all, trainers publish deltas. They store
    the newest two in the folder ``store``.
    """

    def __init__(
        self,
        transport: str,
        tally: Tally,
        network: Network | Relay | None = None,
        mutant: str = "",
        *,
        sources: bool = False,
        fan_out: int | None = None,
        every: int = 1,
        store: str | None = None,
    ) -> None:
        self.every, self._store = every, store
        self.transport, self.network, self._mutant, self._sources, self._fan_out = transport, network, mutant, sources, fan_out
        self.tally = tally
        self.version = 0
        self.digest = ""
        """Of the last version that was published well."""
        self._replicas = 3 if sources else 2
        self.injected: Counter[str] = Counter()
        """Faults by kind: ``kill``, ``stop``, ``corruption``, ``network``, ``fork``."""
        self.unclean: list[str] = []
        """Parties that did not end by themselves when they were asked to."""
        self.orphans: list[int] = []
        """Processes that outlive a killed party."""
        self._traps: tuple[Trap, ...] = ()
        self._springing = threading.Lock()
        self._token, self._operator = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        host = "127.0.0.1" if network is None else network.host
        self._port = self._free_port(host)
        self._address = Address("http", host, self._port)
        self._data_ports = [self._free_port(host) for _ in range(2)]
        self.parties: dict[str, Party] = {}
        with ExitStack() as owned:
            owned.callback(self._end_all)
            more = ("spare-0",) if sources else ()
            for name in ("coordinator", "trainer-0", "trainer-1", "duo-0", "duo-1", "solo-0", *more):
                self.start(name)
            owned.pop_all()

    def _free_port(self, host: str) -> int:
        if isinstance(self.network, Relay):
            return self.network.free_port()
        with socket.create_server((host, 0)) as listener:
            port: int = listener.getsockname()[1]
            return port

    def start(self, name: str) -> None:
        """Start a party, anew if it was killed, and wait until it has joined."""
        old = self.parties.pop(name, None)
        if old is not None:
            old.end(0.0)
        common: dict[str, Any] = {
            "coordinator": self._address.url,
            "token": self._token,
            "transport": self.transport,
            "mutant": self._mutant,
        }
        common |= {"every": self.every, "store": self._store}
        kind, _, rank = name.partition("-")
        if name == "coordinator":
            settings = {"fan_out": self._fan_out, "round_deadline": ROUND_SECONDS} if self._sources else {}
            config = {**common, "operator": self._operator, "host": self._address.host, "port": self._port, "settings": settings}
            party = Party(name, parties.coordinator, config, self)
        elif kind == "trainer":
            config = {**common, "rank": int(rank), "world": 2}
            if isinstance(self.network, Relay):
                config["tcp"] = {"bind": self.network.host, "port": self._data_ports[int(rank)], "advertise": self.network.known_as}
            party = Party(name, parties.trainer, config, self)
        else:
            if isinstance(self.network, Relay):
                common["coordinator"] = Address("http", self.network.known_as, self._port).url
            world, delivery = {"duo": (2, "direct"), "solo": (1, "streamed"), "spare": (1, "direct")}[kind]
            namespace = self.network.namespace if self.network is not None and kind == "solo" else None
            config = {**common, "replica": kind, "rank": int(rank), "world": world, "delivery": delivery, "namespace": namespace}
            config["serve"] = self._sources
            party = Party(name, parties.engine, config, self)
        self.parties[name] = party
        party.hear(_START_SECONDS)

    def set(self, *traps: Trap) -> None:
        """Lay these traps, and take all others away."""
        self._traps = traps

    def at(self, party: Party, point: str) -> dict[str, Any]:
        """A process reached a point: what it is to do before it goes on."""
        with self._springing:
            waiting = (one for one in self._traps if one.point == point and one.party in (party.name, "*") and not one.struck)
            trap = next(waiting, None)
            if trap is None:
                return {}
            trap.struck = trap.victim or party.name
        victim = self.parties[trap.struck]
        if trap.strike is not None:
            trap.strike()
        elif trap.act == "kill":
            victim.signal(signal.SIGKILL)
            self.injected["kill"] += 1
        elif trap.act == "stop":
            victim.signal(signal.SIGSTOP)
            self.injected["stop"] += 1
        elif trap.act in (ORPHAN, UNWIND):
            return {"fork": trap.act}  # it tells of the child: see forked(), which springs it
        elif trap.act == "cut" and self.network is not None:
            self.network.cut()
            self.injected["network"] += 1
        elif trap.act == "break" and isinstance(self.network, Relay):
            self.network.drop()
            self.injected["network"] += 1
        else:
            self.injected["corruption"] += 1
        trap.sprung.set()
        return trap.order

    def forked(self, party: Party, child: int) -> dict[str, Any]:
        """A party forked, since it was told to: it is killed if its child is to outlive it."""
        mine = (one for one in self._traps if one.party == party.name and one.act in (ORPHAN, UNWIND) and not one.sprung.is_set())
        trap = next(mine, None)
        if trap is not None and trap.act == ORPHAN:
            self.orphans.append(child)
            party.signal(signal.SIGKILL)
            self.injected["kill"] += 1
        else:
            self.injected["fork"] += 1
        if trap is not None:
            trap.sprung.set()
        return {}

    @property
    def trainers(self) -> Iterator[Party]:
        """Both trainer ranks."""
        return (self.parties[name] for name in ("trainer-0", "trainer-1"))

    def client(self) -> Client:
        """A client of the coordinator, as its operator; close it."""
        return Client(ClientSettings(coordinator=self._address, timeouts=Timeouts(connect=10.0)), Secret(self._operator))

    def status(self) -> Status:
        """What the coordinator says."""
        with self.client() as client:
            return client.status()

    def publish(self, timeout: float) -> tuple[int, list[Party]]:
        """Tell both trainer ranks to publish the next version; its number, and who will answer."""
        self.version += 1
        asked = list(self.trainers)
        for party in asked:
            party.tell(number=self.version, timeout=timeout)
        return self.version, asked

    def publish_well(self, timeout: float = 20.0) -> str:
        """Publish the next version to everybody; its digest. Raises :class:`~weightsync.errors.WeightSyncError` otherwise."""
        self.all_here(timeout)
        number, asked = self.publish(timeout)
        answers = [party.hear(timeout + 5.0) for party in asked]
        if any(answer["error"] for answer in answers):
            raise WeightSyncError(f"version {number}: {[answer['error'] for answer in answers]}; {self.describe()}")
        digest: str = answers[0]["digest"]
        wrong = self.not_at(number, digest)
        if wrong:
            raise WeightSyncError(f"after version {number}: {wrong}; {self.describe()}")
        self.digest = digest
        return digest

    def all_here(self, timeout: float) -> None:
        """Wait until every rank is connected (again). Raises :class:`~weightsync.errors.DeadlineExceeded`."""

        def here() -> bool:
            now = client.status()
            whole = len(now.replicas) == self._replicas and not any(replica.missing for replica in now.replicas)
            return len(now.trainer) == 2 and whole

        deadline = Deadline(timeout)
        with self.client() as client, client.events() as events:
            if here():
                return
            for event in events:
                deadline.remaining("waiting for every rank to connect")
                if isinstance(event, Joined) and here():
                    return

    def wait_until(self, what: str, holds: Callable[[], bool], timeout: float) -> None:
        """Wait until ``holds()``, which is looked at after every event. Raises :class:`~weightsync.errors.DeadlineExceeded`."""
        deadline = Deadline(timeout)
        with self.client() as client, client.events() as events:
            if holds():
                return
            for _ in events:
                if holds():
                    return
                deadline.remaining(f"waiting until {what}: {self.describe()}")

    def not_at(self, number: int, digest: str | None, name: str = "") -> list[str]:
        """Replicas (or that of ``name``) that the coordinator does not hold for loaded with that version and digest."""
        return [
            f"{replica.name} is {replica.state} at {replica.version} ({replica.digest}), not at {number} ({digest})"
            for replica in self.status().replicas
            if name in ("", replica.name)
            and (replica.state, replica.version, replica.digest) != ("loaded", number, digest or replica.digest)
        ]

    def describe(self) -> str:
        """Return one line for a failure: each replica's state, and the errors of the last rounds."""
        try:
            status = self.status()
        except WeightSyncError as error:
            return str(error)
        replicas = ", ".join(f"{one.name} {one.state} {one.version} {one.error or ''}" for one in status.replicas)
        rounds = "; ".join(
            f"round of version {result.version.number}: {result.error or 'ok'}, "
            + ", ".join(f"{one.name} {one.state} {one.error or ''}" for one in result.replicas)
            for result in status.rounds[-3:]
        )
        return f"{replicas}; {rounds}"

    def _end_all(self) -> None:
        for name in reversed(list(self.parties)):
            party = self.parties.pop(name)
            if not party.end(_END_SECONDS):
                self.unclean.append(name)

    def close(self) -> None:
        """End every process, engines first and the coordinator last."""
        self._end_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
