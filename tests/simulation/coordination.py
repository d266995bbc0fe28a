"""The coordinator's simulated process: the real coordinator, and the service's real end of the agents' sockets."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.network import Wire
from tests.simulation.ranks import TOKEN, EngineProcess, Process

from weightsync.config import RoundSettings, Secret, ServerSettings
from weightsync.coordinator import Coordinator
from weightsync.coordinator.events import Audited, Event, ReplicaEnded, ReplicaPhase, RoundEnded, RoundStarted
from weightsync.coordinator.publish_barrier import AgreedPublication
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline
from weightsync.coordinator.ranks import EngineRank, RankNode, TrainerRank
from weightsync.coordinator.replicas import Replica
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.tokens import Secrets
from weightsync.server.agents import AgentSockets
from weightsync.server.app import Service

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["GRACE", "CoordinatorProcess"]

GRACE = 4.0
_MARGIN = 6.0  # seconds that trouble may still be felt after it is over
_MOMENT = 0.2  # for frames that are under way
_LONGEST = 120.0
_BETWEEN_LOOKS = 2.5  # at what replicas serve
_SOURCES = {"trainer": "the trainer", "store": "the store"}
_LEFT_OUT = ("lost", "refused")
_ROOMY = 10.0  # a round of so many seconds has time for everybody who is well
_SERVER = ServerSettings(state_dir="off")
_SECRETS = Secrets(TOKEN, Secret("of-operators"))


@functools.cache
def _settings(max_unavailable: int | None, fan_out: int | None, everybody: bool) -> RoundSettings:
    """Checked once: to check every field takes a hundredth of a schedule."""
    return RoundSettings(
        run="simulated",
        grace=GRACE,
        timeout=_LONGEST,
        max_unavailable=max_unavailable,
        fan_out=fan_out,
        require="all" if everybody else "any",
    )


class CoordinatorProcess(Process):
    """One life of the coordinator."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "coordinator")
        self.coordinator = self._make_coordinator()
        self.coordinator._audits.least_seconds = _BETWEEN_LOOKS
        self.coordinator._audits.stagger = lambda: 1.0
        self.service = Service(self.coordinator, _SERVER, _SECRETS) if world.people else None
        """The whole service, where somebody may send it requests."""
        self.sockets = AgentSockets(self.coordinator, _SERVER) if self.service is None else self.service._agents
        self.started = world.loop.time()
        self.ready = asyncio.Event()
        """It takes connections."""
        self._round = (0.0, 0.0, False)
        self._limit = self._until = 0.0
        self._turns: dict[str, float] = {}
        """Replicas that have waited for their turn in the running round, and what was left of the round when it came."""
        self._expected: set[str] = set()
        """Replicas that the running publication must account for."""
        emit = self.coordinator._feed.emit

        def spy(event: Event) -> None:
            self._saw(event)
            emit(event)

        self.coordinator._feed.emit = self.coordinator._audits._emit = spy  # type: ignore[method-assign]
        self._known: set[str] = set()
        self._count_what_events_do_not_tell()
        world.begin(self)

    def _make_coordinator(self) -> Coordinator:
        world = self.world
        return Coordinator(_settings(world.max_unavailable, world.fan_out, world.misfit is not None), world.store_key)

    def _count_what_events_do_not_tell(self) -> None:
        coordinator, seen = self.coordinator, self.world.seen
        join, exclude, asked_before = coordinator.join_engine, coordinator._exclude, coordinator._rendezvous._asked_before

        def joining(node: RankNode[EngineRank]) -> str:
            member = node.rank.member
            if node.rank.hello.serving is not None:
                lost = member in self._known
                seen[f"rank reports a version to a {'coordinator that had lost it' if lost else 'new coordinator'}"] += 1
            self._known.add(member)
            return join(node)

        def excluding(replica: Replica, why: str) -> None:
            seen["quarantine outside of a round"] += 1
            exclude(replica, why)

        def asking(link: RankHandle[TrainerRank], call: int) -> Any:
            found = asked_before(link, call)
            seen["publication asked for again"] += found is not None
            return found

        publish = coordinator._publish

        def publishing(asked: AgreedPublication, deadline: RoundDeadline, grace: float) -> Any:
            self._until = deadline.at
            return publish(asked, deadline, grace)

        coordinator._publish = publishing  # type: ignore[method-assign]
        coordinator.join_engine = joining  # type: ignore[method-assign]
        coordinator._exclude = excluding  # type: ignore[method-assign]
        coordinator._rendezvous._asked_before = asking  # type: ignore[method-assign]

    def accept(self, wire: Wire) -> None:
        """A connection comes in."""
        self.wires.append(wire)
        self.spawn(self._serve(wire))

    async def _serve(self, wire: Wire) -> None:
        await self.ready.wait()
        if not self.alive:
            wire.close("server")
            return
        await self.sockets.endpoint(cast("Any", wire.socket))

    async def request(self, method: str, path: str, body: bytes) -> int:
        """Send the service a request with a worker's token, past h11 and its sockets; the status of its answer, 0 without one."""
        if self.service is None or not self.alive:
            return 0
        statuses: list[int] = []
        arriving = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return arriving.pop() if arriving else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer " + TOKEN.reveal().encode())], "scheme": "http",
            "http_version": "1.1", "client": ("127.0.0.1", 50_000), "server": ("127.0.0.1", 7400), "asgi": {"version": "3.0"},
        }  # fmt: skip
        await self.service.asgi(scope, receive, send)
        return statuses[0] if statuses else 0

    def crash(self) -> None:
        """Without a word to anybody."""
        self.alive = False
        self.world.coordinator = None
        for wire in self.wires:
            wire.lose(self.world.notice(), 0.0)
        self.world.loop.create_task(self.coordinator.aclose())  # speaks to nobody any more

    def shut_down(self) -> None:
        """In good order, as the service does it."""
        self.world.coordinator = None
        self.world.trouble(self, 0.0)

        async def close() -> None:
            await self.coordinator.aclose()
            await self.sockets.aclose("the coordinator shuts down")
            self.alive = False

        self.world.loop.create_task(close())

    def _saw(self, event: Event) -> None:
        world, seen = self.world, self.world.seen
        if world.coordinator is not self:
            return
        match event:
            case Audited(replica=name, error=None):
                seen["read again while it served"] += 1
            case Audited(replica=name, error=error):
                seen["other weights were found in what was served"] += 1
                # A thief is none of these. It overwrites its own parameters, and a look with a key finds what it forged.
                ours = [engine for engine in world.engines.values() if engine.name == name]
                if ours and not any(engine.wrecked for engine in ours):
                    world.violated("spoiled", f"{name} was taken out of service with the weights of its version: {error}")
            case ReplicaPhase(replica=name, phase=phase):
                seen[f"phase {phase}"] += 1
                if phase == "wait" or (phase == "pause" and name in self._turns):
                    self._turns[name] = self._round[0] + self._limit - world.loop.time()
            case RoundStarted(seeding=seeding, epoch=epoch, number=number, replicas=names):
                self._round, self._turns = (world.loop.time(), world.jumped, seeding), {}
                self._limit = _LONGEST if seeding else max(self._until - world.loop.time(), 0.0)  # a clock may have jumped past it
                known = self.coordinator._members.replicas.values()
                self._expected = set() if seeding else {replica.name for replica in known if not replica.departed}
                # A thief, which is none of ours, may claim the newest number with a digest of its choice.
                names_of_ours = {engine.name for engine in world.engines.values()}
                honest = [replica for replica in known if replica.name in names_of_ours]
                serving = {other.name for other in honest if other.version is not None and other.version.order == (epoch, number)}
                if seeding and (again := sorted(serving.intersection(names))):
                    world.violated("spoiled", f"{again} are taken out of service for the version that they serve")
            case ReplicaEnded(result=result) if result.error is None:
                seen[f"delivery {result.delivery}"] += 1
                fed = f"fed by {_SOURCES.get(result.source, 'a replica')}"
                seen[f"{fed}{' while seeding' if self._round[2] else ''}"] += 1
                seen[f"verified {result.verified}"] += 1
                seen["updated by changes"] += result.base is not None
            case RoundEnded(result=None, error=error):
                self._ended()
                self._excused(None, str(error))
                cancelled = "Cancelled" in (error or "")
                seen["seeding round cancelled" if self._round[2] and cancelled else "round without a version"] += 1
            case RoundEnded(result=result) if result is not None:
                self._ended()
                seen["round ok" if result.ok else "round not ok"] += 1
                seen["seeding round ok"] += self._round[2] and result.ok
                self._look_for_dropped(result)
                failed = [one for one in result.replicas if one.error is not None]
                seen["replica failed alone"] += 0 < len(failed) < len(result.replicas)
                for one in failed:
                    seen[f"replica left out: {one.state}"] += one.state in _LEFT_OUT
                    seen["kept its version after a failed update"] += "move" in one.phases and one.state == "loaded"
                    of_trainer = self._round[2] and world.in_place and one.source in ("", "trainer")
                    if of_trainer and one.state == "dirty" and "StaleSource" in str(one.error):
                        world.violated(
                            "spoiled", f"{one.name} was taken out of service for a version that nobody holds: {one.error}"
                        )
                    if one.state not in _LEFT_OUT:
                        self._excused(one.name, str(one.error))

    def _look_for_dropped(self, result: RoundResult) -> None:
        """Every replica that is known is in the result, and counts for what is required."""
        dropped = self._expected - {one.name for one in result.replicas}
        if dropped:
            self.world.violated("dropped", f"a result with ok={result.ok} says nothing of {sorted(dropped)}")
        if self.coordinator.settings.require == "all" and result.ok and any(one.error for one in result.replicas):
            self.world.violated("dropped", f"a round that needs all replicas is ok without one: {result}")

    def _ended(self) -> None:
        """A round ends by its deadline, or by the end of the quarantine that follows."""
        started, jumped, _ = self._round
        late = self.world.loop.time() - started - (self.world.jumped - jumped) - self._limit - GRACE - _MOMENT
        if late > 0:
            self.world.violated("hang", f"a round of {self._limit:g} s ended {late:.3f} s late")

    def _excused(self, name: str | None, error: str) -> None:
        """Only a replica with a trouble of its own, or of a trainer's, may fail; and a whole round only with a trainer's.

        One that was waiting for its turn may fail by the trouble of whoever had it, and serves on as it was. If its turn comes
        late in the round, it may run out of time by that, too.
        """
        world = self.world
        started, jumped, seeding = self._round
        if world.jumped != jumped or self._limit < _ROOMY or (seeding and (name is None or world.excuses(started))):
            return
        late = name is not None and self._turns.get(name, _ROOMY) < _ROOMY and ": DeadlineExceeded: " in error
        waited = late or error.startswith("wait: DeadlineExceeded") or "DeadlineExceeded: its turn came" in error
        anybody = waited or (seeding and world.serving)  # perhaps there is no trainer to read from instead
        if name is not None and name not in world.shape and world.people:
            return  # a thief's
        ranks: list[Process] = [engine for engine in world.engines.values() if engine.name == name or anybody]
        if not anybody and any(isinstance(rank, EngineProcess) and rank.ranks != len(ranks) for rank in ranks):
            return
        if any(one.troubled_until + _MARGIN > started for one in (*ranks, *world.sources(), self)):
            return
        if any(reason in error for reason in ("is not complete", "disconnected", "went away", "not connected")):
            return
        if seeding and "cannot be compared with version" in error:
            return  # its trainer changed its memory or left, and a coordinator that crashed had the digests: it waits, as promised
        world.violated("infected", f"{'the round' if name is None else f'replica {name}'} had no trouble, and failed: {error}")
