"""The data plane: a scheme that maps a simulated trainer rank's real region, slowly, with losses and corruption on demand."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tests.simulation.threads import Event, threads

from weightsync.deadline import Deadline
from weightsync.errors import BroadcastBroken, PeerLost
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.host.mapped import MappedReader
from weightsync.transports.host.region import PublishedRegion

if TYPE_CHECKING:
    from tests.simulation.ranks import Agent, EngineProcess
    from tests.simulation.world import World

__all__ = ["CORRUPTIONS", "Simulated", "corrupted"]

CORRUPTIONS = ("flipped bit", "swapped rows", "dropped piece", "repeated piece", "reordered pieces")

_TOGETHER = 2
"""Broadcasts of a window that other readers can break: after that the real sender sends to each reader alone."""


def corrupted(payload: npt.NDArray[np.uint8], stale: npt.NDArray[np.uint8], kind: str, draw: Any) -> npt.NDArray[np.uint8]:
    """A copy of ``payload`` with one fault of ``kind``; ``stale`` is what lay there before; ``draw`` a :class:`random.Random`."""
    out = payload.copy()
    size = len(out)
    piece = max(min(8, size // 4), 1)
    a, b, c = sorted(draw.sample(range(0, max(size - piece, 3)), 3))
    match kind:
        case "flipped bit":
            out[draw.randrange(size)] ^= 1 << draw.randrange(8)
        case "swapped rows":
            out[a : a + piece], out[c : c + piece] = payload[c : c + piece], payload[a : a + piece]
        case "dropped piece":
            out[a : a + 2 * piece] = stale[a : a + 2 * piece]
        case "repeated piece":
            out[c : c + piece] = payload[a : a + piece]
        case "reordered pieces":
            out[a : a + piece], out[b : b + piece], out[c : c + piece] = (
                payload[c : c + piece],
                payload[a : a + piece],
                payload[b : b + piece],
            )
    return out


class _Publisher:
    """Lets readers map the region of one simulated rank."""

    def __init__(self, scheme: Simulated, region: PublishedRegion, owner: Agent, here: Host) -> None:
        self.region, self.owner = region, owner
        self.open = True
        self.sources: list[SimulatedReader] = []
        self.offer = Offer(Simulated.name, f"region-{next(scheme.names)}", here, scheme.traits)
        self._scheme = scheme
        scheme.owners[self.offer.address] = self

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        self.open = False
        self._scheme.owners.pop(self.offer.address, None)
        for source in self.sources:
            source.wake.set()


class SimulatedReader(MappedReader):
    """The real mapped source, in simulated time."""

    def __init__(self, world: World, owner: _Publisher, engine: EngineProcess) -> None:
        region = owner.region
        super().__init__(region.memory, region.nbytes, region.layout_digest, owner.owner.member)
        self.world, self._owner_side, self.engine = world, owner, engine
        self.wake = Event()
        self._lost = False
        self._reading = False
        self._broken = 0
        world.open_sources += 1

    def _publisher_lives(self) -> bool:
        return self._owner_side.open and not self._lost

    def _release(self) -> None:
        self.world.open_sources -= 1

    def _check(self, deadline: Deadline, what: str) -> None:
        if self._reading:  # before the copy, and between it and the look at the region's stamp
            threads().sleep(self.world.random.uniform(0.0, 0.001))
        super()._check(deadline, what)

    def _pass(self, point: str, deadline: Deadline) -> str | None:
        """Time passes, and whatever the schedule wants to happen here."""
        world, engine, owner = self.world, self.engine, self._owner_side.owner
        if point == "read":
            world.at_source(engine, owner)
        seconds, kind = world.at_point(engine, owner.points + point, fast=0.002)
        if kind == "lost":
            self._lost = True
        self.wake.clear()
        if not self._aborted and self._owner_side.open:
            self.wake.wait(min(seconds, deadline.remaining(f"{point} at {engine.member}")))
        if kind == "fail":
            raise PeerLost(f"{engine.member} was told to fail in {point}")
        return kind

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        super().prepare(*args, **kwargs)
        self.world.checked()

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`."""
        self._pass("begin", deadline)
        super().begin(version, deadline)

    def read(self, group: int, *rest: Any) -> Any:
        """See :meth:`weightsync.transports.base.Reader.read`."""
        deadline = next(value for value in rest if isinstance(value, Deadline))
        kind = self._pass("read", deadline)
        if self._broken < _TOGETHER and self.world.broadcast_breaks():
            self._broken += 1
            raise BroadcastBroken("another reader was told to leave")
        self._broken = 0
        if self._owner_side.owner.lies and kind not in CORRUPTIONS:
            kind = CORRUPTIONS[0]
        clean: Any = self._addresses
        if kind in CORRUPTIONS:
            region = self._owner_side.region
            stale = self._owner_side.owner.stale
            wrong = corrupted(region.payload, stale, str(kind), self.world.random)
            addresses: Any = np.array([wrong.ctypes.data], np.int64)
            self._addresses = addresses
        self._reading = True
        try:
            return super().read(group, *rest)
        finally:
            self._reading = False
            self._addresses = clean
            if self._owner_side.owner.points:  # which is not for the engine's parameters
                self.world.corruptions += kind in CORRUPTIONS
            elif not (0 <= group < len(self._groups)) or self._groups[group].keys is not None:  # lists of changes have no keys
                self.engine.written(kind)

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.abort`."""
        super().abort()
        self.wake.set()


class Simulated(Transport):
    """The transport ``simulated``."""

    name = "simulated"

    def __init__(self, world: World) -> None:
        self.world = world
        self.traits = Traits(live_source=True, shared_fate=world.sharing)
        self.owners: dict[str, _Publisher] = {}
        self.names = itertools.count()

    def reaches(self, offer: Offer, here: Host) -> bool:
        """See :class:`weightsync.transports.base.Transport`."""
        return True

    def publish(self, region: PublishedRegion, key: bytes, here: Host, network: Network = LOOPBACK) -> _Publisher:
        """See :class:`weightsync.transports.base.Transport`."""
        return _Publisher(self, region, self.world.starting(), here)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> SimulatedReader:
        """See :class:`weightsync.transports.base.Transport`."""
        engine = self.world.current_engine()
        owner = self.owners.get(offer.address)
        points = "" if owner is None else owner.owner.points
        seconds, kind = self.world.at_point(engine, f"{points}connect", fast=0.002)
        threads().sleep(min(seconds, deadline.remaining("connecting")))
        owner = self.owners.get(offer.address)
        if owner is None or kind in ("fail", "lost"):
            raise PeerLost("the source is gone")
        source = SimulatedReader(self.world, owner, engine)
        owner.sources.append(source)
        return source
