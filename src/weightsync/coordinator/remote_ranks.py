"""Ranks behind a connection: their validated self-descriptions, and calls on them. No answer is trusted without a check."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from weightsync.coordinator.coordinator import Coordinator
from weightsync.coordinator.ranks import EngineRank, PublishingRank, TrainerRank
from weightsync.errors import ConfigurationError, MembershipError, ProtocolError, readable
from weightsync.model import Layout, Manifest, PauseMode, Version
from weightsync.protocol.calls import Calls
from weightsync.protocol.messages import (
    PROTOCOL,
    Body,
    CannotPublish,
    CheckSources,
    Commit,
    Done,
    EndStream,
    Hello,
    Move,
    Moved,
    MoveWindow,
    OpenStream,
    Pause,
    Place,
    Placed,
    PlaceWindow,
    PlanSlice,
    Prepare,
    Prepared,
    Publish,
    Published,
    Quarantine,
    ReplicaList,
    Resume,
    Update,
    Updated,
    WaitForReplicas,
    WindowMoved,
    WindowPlaced,
)

__all__ = ["TRAINER", "RemoteEngine", "RemoteTrainer", "answer_agent", "rank_of"]

TRAINER = "trainer"
"""Name under which trainer ranks connect. No replica may use it."""

_MOST_RANKS = {"trainer": 1 << 16, "engine": 1 << 12}
_MOST_OFFERS = 64
_MOST_BUCKET = 1 << 40
_DEFAULT_BUCKET = 256 << 20
_LONGEST = 200
_FEWEST_WINDOWS = 2
_HEX = re.compile(r"[0-9a-f]{0,128}")

A = TypeVar("A")
R = TypeVar("R", TrainerRank, EngineRank)


def rank_of(hello: Hello, run: str) -> TrainerRank | EngineRank:
    """Return the rank described by ``hello``, for the coordinator of ``run``. Its member name is ``name/rank``.

    Raises:
        ProtocolError: The protocol version differs, or a number or text is out of range.
        MembershipError: The rank belongs to another run, or uses a reserved name.
        ConfigurationError: The manifest is impossible, or a trainer gives no layout or no address.
        LayoutError: The layout is invalid.
    """
    if hello.protocol != PROTOCOL:
        raise ProtocolError(
            f"the agent speaks protocol {hello.protocol}, the coordinator {PROTOCOL}: install the same weightsync on both"
        )
    if hello.run != run:
        raise MembershipError(f"the agent belongs to run {hello.run!r}, but this coordinator serves run {run!r}")
    for what, text in (("name", hello.name), ("session", hello.session)):
        if not text or len(text) > _LONGEST or not text.isprintable() or "/" in text:
            raise ProtocolError(f"an agent's {what} must be 1 to {_LONGEST} printable characters without '/', not {text[:40]!r}")
    if (hello.name == TRAINER) != (hello.role == "trainer"):
        raise MembershipError(f"{hello.name!r} cannot be the name of an agent of role {hello.role}")
    if not (0 <= hello.rank < hello.world_size <= _MOST_RANKS[hello.role]):
        most = _MOST_RANKS[hello.role]
        raise ProtocolError(f"{hello.name} reports rank {hello.rank} of {hello.world_size}; at most {most:,} ranks are allowed")
    if not 0 <= hello.bucket_bytes <= _MOST_BUCKET:
        raise ProtocolError(f"{hello.name} asks for buckets of {hello.bucket_bytes} bytes; at most {_MOST_BUCKET} are allowed")
    if len(hello.offers) > _MOST_OFFERS or len(hello.transports) > _MOST_OFFERS:
        raise ProtocolError(f"{hello.name} lists more than {_MOST_OFFERS} transports")
    _check_texts(hello)
    member = f"{hello.name}/{hello.rank}"
    manifest = Manifest(hello.manifest)
    if len(manifest) and (hello.window_bytes or hello.takes_any):
        raise ConfigurationError(f"{member} lists tensors, but says that they are not known before a stream")
    if bool(hello.window_bytes) != bool(hello.windows) or (hello.windows and (hello.windows < _FEWEST_WINDOWS or not hello.live)):
        raise ConfigurationError(f"{member} cannot publish streams with {hello.windows} windows of {hello.window_bytes} bytes")
    source = _source_of(hello, member, manifest)
    if hello.role == "trainer":
        if source is None:
            raise ConfigurationError(f"{member} must send the layout of its shards and at least one transport offer")
        return TrainerRank(
            **vars(source),
            published=hello.published,
            epoch=hello.epoch,
            new_epoch=hello.new_epoch,
            version=hello.version,
            window_bytes=hello.window_bytes,
            windows=hello.windows,
            pid=hello.pid,
            credential=hello.credential,
        )
    return EngineRank(
        member=member,
        source=source,
        replica=hello.name,
        rank=hello.rank,
        world_size=hello.world_size,
        session=hello.session,
        host=hello.host,
        manifest=manifest,
        layout=None if hello.layout is None else Layout.from_columns(manifest, hello.layout),
        transports=hello.transports,
        no_layout=readable(hello.no_layout, 1000),
        device_memory=hello.device_memory,
        takes_any=hello.takes_any,
        delivery=hello.delivery,
        bucket_bytes=hello.bucket_bytes or _DEFAULT_BUCKET,
        adapter=hello.adapter or "custom",
        serving=hello.serving,
        pid=hello.pid,
        credential=hello.credential,
    )


def _source_of(hello: Hello, member: str, manifest: Manifest) -> PublishingRank | None:
    """What other ranks can read from this one.

    Raises:
        ConfigurationError: It describes memory without saying how it is reached, or an engine rank describes memory of no tensor.
        LayoutError: The layout is invalid.
    """
    trainer = hello.role == "trainer"
    layout = hello.layout if trainer else hello.source_layout
    if layout is None and not hello.offers:
        return None
    if layout is None or not hello.offers or not (trainer or len(manifest)):
        raise ConfigurationError(f"{member} must send the layout of what others read from it and at least one transport offer")
    return PublishingRank(
        member=member,
        rank=hello.rank,
        world_size=hello.world_size,
        session=hello.session,
        host=hello.host,
        manifest=manifest,
        layout=Layout.from_columns(manifest, layout),
        offers=hello.offers,
        key=hello.key,
        live=hello.live,
    )


def _check_texts(hello: Hello) -> None:
    """Reject texts that must not appear in status and logs.

    Raises:
        ProtocolError: A text is not printable, or a version is malformed.
    """
    hosts = [hello.host, *(offer.host for offer in hello.offers)]
    texts = [hello.adapter, *hello.transports, *(text for host in hosts for text in (host.name, host.memory))]
    texts += [text for offer in hello.offers for text in (offer.scheme, offer.address)]
    for text in texts:
        if not text.isprintable():
            raise ProtocolError(f"{hello.name} sent a text that is not printable: {text[:40]!r}")
    for version in (hello.serving, hello.version):
        if version is None:
            continue
        hexadecimal = _HEX.fullmatch(version.manifest) and _HEX.fullmatch(version.digest)
        if not (hexadecimal and version.run.isprintable() and len(version.run) <= _LONGEST):
            raise ProtocolError(f"{hello.name} reports a malformed version: digests are hexadecimal digits")


def answer_agent(coordinator: Coordinator, rank: TrainerRank | EngineRank) -> Callable[[Body, float], Awaitable[Body]]:
    """Return the handler for calls of this rank's agent: the ``handle`` of its :class:`~weightsync.protocol.calls.Calls`."""

    async def handle(body: Body, timeout: float) -> Body:
        if isinstance(body, Publish) and isinstance(rank, TrainerRank):
            return Published(await coordinator.publish(rank.member, body.number, timeout, body.call, body.step))
        if isinstance(body, CannotPublish) and isinstance(rank, TrainerRank):
            coordinator.cannot_publish(rank.member, body.number, f"{body.kind}: {body.message}")
            return Done()
        if isinstance(body, WaitForReplicas) and isinstance(rank, TrainerRank):
            return ReplicaList(await coordinator.wait_for_replicas(rank.member, body.count, timeout, body.names))
        raise ProtocolError(f"{rank.member} may not send {type(body).__name__} to the coordinator")

    return handle


class _RemoteRank(Generic[R]):
    """A rank at the other end of ``calls``. ``dismiss`` closes its connection with a reason."""

    def __init__(self, rank: R, calls: Calls, dismiss: Callable[[str], None]) -> None:
        self.rank: R = rank
        """Self-description of the rank."""
        self.dismiss = dismiss
        self._calls = calls

    def notify(self, text: str) -> None:
        """Send ``text`` as a notice."""
        self._calls.notify(text)

    async def _ask(self, body: Body, kind: type[A], timeout: float) -> A:
        """Send ``body``, whose answer is a ``kind``."""
        answer = await self._calls.call(body, timeout)
        if not isinstance(answer, kind):
            raise ProtocolError(f"{self.rank.member} answered {type(body).__name__} with {type(answer).__name__}")
        return answer

    async def _place(self, body: Place, rows: int, timeout: float) -> npt.NDArray[np.uint64]:
        placed = await self._ask(body, Placed, timeout)
        return _digests(self.rank.member, placed.digests, rows, "rows")


class RemoteTrainer(_RemoteRank[TrainerRank]):
    """A trainer rank at the other end of a connection."""

    async def place(self, number: int, timeout: float, epoch: int) -> npt.NDArray[np.uint64]:
        """Let the rank place version ``number``. Returns the digest of each row of its layout, ``uint64[rows]``."""
        return await self._place(Place(number, epoch), len(self.rank.layout), timeout)

    async def place_window(self, body: PlaceWindow, timeout: float) -> WindowPlaced:
        """Let the rank place a window. Returns what is in it, or the end of the stream."""
        placed = await self._ask(body, WindowPlaced, timeout)
        if len(placed.digests) != 8 * len(placed.parts) or not 0 <= placed.nbytes <= body.window_bytes:
            raise ProtocolError(f"{self.rank.member} described a window of {placed.nbytes:,} bytes wrongly")
        return placed


class RemoteEngine(_RemoteRank[EngineRank]):
    """An engine rank at the other end of a connection."""

    _plan: PlanSlice | None = None

    async def prepare(self, plan: PlanSlice, timeout: float) -> Prepared:
        """Send the plan and wait until the rank is ready for it."""
        prepared = self._checked(await self._ask(Prepare(plan), Prepared, timeout), len(plan.sources))
        self._plan = plan
        return prepared

    async def place(self, number: int, timeout: float, epoch: int) -> npt.NDArray[np.uint64]:
        """Let the rank serve version ``number`` to other replicas. Returns the digest of each row of its source's layout."""
        if self.rank.source is None:
            raise ProtocolError(f"{self.rank.member} does not serve its weights to other replicas")
        return await self._place(Place(number, epoch), len(self.rank.source.layout), timeout)

    async def check_sources(self, number: int, timeout: float) -> None:
        """Check that version ``number`` can be read."""
        await self._ask(CheckSources(number), Done, timeout)

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop generation."""
        await self._ask(Pause(mode), Done, timeout)

    async def move(self, number: int, timeout: float) -> Moved:
        """Move version ``number`` into place."""
        rows = self._rows()
        return self._whole(await self._ask(Move(number), Moved, timeout), rows)

    async def open_stream(self, body: OpenStream, timeout: float) -> Prepared:
        """Let the rank connect to the trainer's windows."""
        return self._checked(await self._ask(body, Prepared, timeout), len(body.sources))

    async def move_window(self, body: MoveWindow, timeout: float) -> npt.NDArray[np.uint64]:
        """Move a window into place. Returns the digest of each of its parts, ``uint64[parts]``."""
        moved = await self._ask(body, WindowMoved, timeout)
        return _digests(self.rank.member, moved.digests, len(body.placed.parts), "tensors")

    async def end_stream(self, body: EndStream, timeout: float) -> Moved:
        """Let the rank load what is left. The answer holds the digest of each tensor of the stream."""
        return await self._ask(body, Moved, timeout)

    async def commit(self, version: Version, timeout: float) -> None:
        """Finish loading, flush caches and set the version label."""
        await self._ask(Commit(version), Done, timeout)

    async def resume(self, timeout: float) -> None:
        """Resume generation."""
        await self._ask(Resume(), Done, timeout)

    async def update(self, version: Version, mode: PauseMode, timeout: float) -> Updated:
        """Pause, move, commit and resume in one exchange."""
        rows = self._rows()
        updated = await self._ask(Update(version, mode), Updated, timeout)
        self._whole(updated.moved, rows)
        return updated

    async def quarantine(self, reason: str, timeout: float) -> None:
        """Abort the running update and stay paused."""
        await self._ask(Quarantine(reason), Done, timeout)

    def _rows(self) -> int:
        if self._plan is None:
            raise ProtocolError(f"{self.rank.member} has no plan yet")
        return self._plan.layout.rows

    def _whole(self, moved: Moved, rows: int) -> Moved:
        _digests(self.rank.member, moved.digests, rows, "rows")
        return moved

    def _checked(self, answer: Prepared, sources: int) -> Prepared:
        if len(answer.transports) > sources:
            raise ProtocolError(f"{self.rank.member} names {len(answer.transports)} transports for {sources} sources")
        if not all(map(str.isprintable, (answer.digest, *answer.transports))):
            raise ProtocolError(f"{self.rank.member} sent a plan digest or transport name that is not printable")
        return answer


def _digests(member: str, packed: bytes, count: int, of: str) -> npt.NDArray[np.uint64]:
    if len(packed) != 8 * count:
        raise ProtocolError(f"{member} sent {len(packed)} bytes of digests, expected 8 for each of {count} {of}")
    return np.frombuffer(packed, "<u8").astype(np.uint64, copy=False)
