"""Typed messages between an agent and the coordinator: tagged structs in MessagePack frames. Decoding executes nothing.

An **agent** (of one trainer or engine rank) opens the connection and sends :class:`Hello`. The coordinator answers :class:`Welcome`
or :class:`Refused`. From then on either side sends :class:`Call` and gets exactly one :class:`Answer` or :class:`Failure` with the
same id. :class:`Cancel` withdraws a call. :class:`Progress` and :class:`Notice` need no answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec

from weightsync.errors import ProtocolError, WeightSyncError, readable
from weightsync.model.layout import LayoutColumns
from weightsync.model.lora import AdapterSpec, LoraSlots
from weightsync.model.manifest import TensorSpec
from weightsync.model.pause import PauseMode
from weightsync.model.result import ReplicaResult, RoundResult
from weightsync.model.version import FIRST_EPOCH, Version
from weightsync.model.window import WindowPart
from weightsync.protocol.delta_messages import ChangedWords, DeltaMessage, Revert, Stage, Staged
from weightsync.protocol.fields import Epoch, Few, Many, Member, Message, Name, Number, Step, Text
from weightsync.protocol.lora_messages import AdapterName, HeldLora, LoraMessage
from weightsync.protocol.plan_messages import Host, Memory, Offer, PieceColumns, PlanSlice, Reach, SourceAddress, Traits
from weightsync.protocol.store_messages import StoreMessage
from weightsync.protocol.update_messages import UpdateMessage
from weightsync.spans import MOST_SPANS, Clock, Seconds, Span

__all__ = [
    "PROTOCOL", "UNREADABLE", "Answer", "Audit", "Body", "Call", "Cancel", "CannotPublish", "ChangedWords", "CheckSources",
    "Commit", "Confirmed", "CountOn", "Delivery", "DigestUnderKey", "Done", "EndCall", "EndStream", "Failure", "Frame", "Hello",
    "Host", "KeepLayout", "LayoutKept", "LetGo", "Memory", "Move", "MoveWindow", "Moved", "Notice", "Offer", "OpenStream", "Pause",
    "PieceColumns", "Place", "PlaceWindow", "Placed", "PlanSlice", "Prepare", "Prepared", "Progress", "Publish", "Published",
    "Quarantine", "Reach", "Refused", "ReplicaList", "ReplicaResult", "Resume", "Revert", "RoundResult", "SourceAddress", "Stage",
    "Staged", "Timing", "Traits", "Update", "Updated", "WaitForReplicas", "Welcome", "WindowMoved", "WindowPlaced", "decode",
    "decoding", "encode",
]  # fmt: skip

PROTOCOL = 12
"""Protocol version. An agent and a coordinator whose versions differ refuse each other, in a message that names both versions."""

UNREADABLE: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for malformed bytes. Only the first one is documented, so catch all three."""


@contextmanager
def decoding(wrong: str, kind: type[WeightSyncError] = ProtocolError) -> Iterator[None]:
    """Raise ``kind`` with the message ``wrong`` and the cause if the block decodes malformed bytes."""
    try:
        yield
    except UNREADABLE as error:
        raise kind(f"{wrong}: {readable(str(error), 500)}") from None


_Call = Number
"""Identifies one call of ``publish()`` of a trainer rank: counted up from a random number, so that no other process has it."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 48) - 1)]
"""Publications that a trainer rank has begun, failed and interrupted ones included. Equal on all ranks."""

DigestKey = Annotated[bytes, msgspec.Meta(max_length=64)]
"""Secret key of a digest; empty for the public constants."""

Delivery = Literal["auto", "direct", "streamed"]


# Agent to coordinator, first frame.


class Hello(Message, frozen=True):
    """First frame of an agent: describes its rank.

    ``session`` is random per process. It distinguishes a restarted process from one that reconnects.
    """

    protocol: int
    run: Name
    role: Literal["trainer", "engine", "adapters"]
    """``adapters``: a rank of a trainer that publishes LoRA adapters."""
    name: Name
    """Name of the replica; for a trainer, ``"trainer"``; for one of adapters, ``"adapters:"`` and anything."""
    rank: int
    world_size: int
    session: Name
    host: Host
    pid: int
    manifest: Annotated[tuple[TensorSpec, ...], Many]
    layout: LayoutColumns | None = None
    """Required from trainers. An engine without a layout supports only streamed delivery."""
    no_layout: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Why this engine rank has no layout, for display."""
    device_memory: bool = False
    """The layout is in GPU memory. If no transport that writes CUDA memory reaches it, this rank can be streamed to instead."""
    offers: Annotated[tuple[Offer, ...], Few] = ()
    """How a trainer rank's shards are reached, or those that an engine rank serves to other replicas."""
    key: Annotated[bytes, msgspec.Meta(max_length=1024)] = b""
    """Secret of the data sockets behind the offers, random per process. Engines receive it with their plan."""
    source_layout: LayoutColumns | None = None
    """Layout of the memory that an engine rank serves to other replicas; ``None`` if it serves none."""
    transports: Annotated[tuple[Name, ...], Few] = ()
    """Schemes with which this engine rank can and may read, best first."""
    delivery: Delivery = "auto"
    bucket_bytes: int = 0
    adapter: Name = ""
    serving: Version | None = None
    """Version that this engine rank already serves, for a coordinator that was restarted."""
    refuted: Text = ""
    """Why it serves none although it generates: its parameters are not what it installed. Empty if they may be."""
    published: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    """Last version number that this trainer rank published, for a coordinator that was restarted."""
    live: bool = False
    """Whether readers read this trainer rank's own memory in place. A version is then readable only until its publication ends."""
    epoch: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] = 0
    """Epoch in which this trainer rank publishes; 0 until the first :class:`Place` has set it."""
    order: Number = 0
    """Highest :attr:`Place.order` that this trainer rank was sent, for a coordinator whose clock is behind that of the last one."""
    new_epoch: bool = False
    count: _Count = 0
    """Publications that this trainer process has begun, for one that joins later."""
    start: _Count = 0
    """What it counts from: what the others had begun when it started. For a coordinator that was restarted before this process
    took part in a round: others that start now begin with its first call, and not with the one in which it is."""
    version: Version | None = None
    """Last version that this trainer rank published: a restarted coordinator checks engines' reports against its digest. Of an
    engine rank the last one that it took, although it may serve none since: its number is not used again."""
    credential: Name = ""
    """From the last :class:`Welcome`. Needed to reconnect before the coordinator has seen the old connection end."""
    window_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    """Of a trainer rank that publishes streams: bytes of each of its staging windows. Its manifest and layout hold no tensor."""
    windows: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    takes_any: bool = False
    """Whether this engine rank takes whatever tensors a stream brings. Its manifest holds no tensor."""
    moves: bool = False
    """Whether this engine rank's layout changes while it serves. Each round begins with :class:`KeepLayout`."""
    url: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Where routers reach the replica of this engine rank."""
    lora_slots: LoraSlots | None = None
    """What LoRA adapters this engine rank takes; ``None`` if it takes none."""
    loras: Annotated[tuple[HeldLora, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Versions of adapters that this engine rank serves."""
    taken_loras: Annotated[dict[AdapterName, Number], msgspec.Meta(max_length=1 << 16)] = msgspec.field(default_factory=dict)
    """The highest number of each adapter that this engine rank took, although it may serve none since: it is not used again."""

    def __repr__(self) -> str:
        return f"<Hello of {self.role} {self.name}/{self.rank}>"  # key and credential must not reach logs


class Welcome(Message, frozen=True):
    """The coordinator accepts the agent."""

    member: Member
    run: Name
    last: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    """For a trainer rank: highest known version number of its epoch."""
    count: _Count = 0
    """For the process of a trainer rank that has not published: what the other ranks have counted to."""
    refusal: Annotated[str, msgspec.Meta(max_length=1 << 20)] = ""
    """For an engine rank: why rounds leave its replica out although it is connected."""
    credential: Annotated[str, msgspec.Meta(max_length=200, pattern=r"^[!-~]*\Z")] = ""
    """Random secret. While this rank is connected, a new connection must present it to replace this one."""

    def __repr__(self) -> str:
        return f"<Welcome of {self.member}>"


class Confirmed(Message, frozen=True):
    """The agent has received its :class:`Welcome`; from now on only its credential can replace the connection. Needs no answer."""


class Refused(Message, frozen=True):
    """The coordinator rejects the agent. ``kind`` is an error's class name."""

    kind: Name
    message: Text


# Bodies of calls, coordinator to trainer; Place also to an engine.


class Place(Message, frozen=True):
    """Copy the shards to the published region, under this number. Answered by :class:`Placed`.

    An engine rank that serves its weights answers only for the version that it serves, else it fails with StaleSource.
    """

    number: Number
    epoch: Epoch = FIRST_EPOCH  # a trainer rank reports it when it reconnects
    call: _Call = 0
    """The trainer rank's :attr:`Publish.call`. It places for no other: its weights may have changed since an interrupted one."""
    bases: Annotated[tuple[Number, ...], Few] = ()  # served by replicas, which want to know what changed since then
    order: Number = 0
    """Equal on all trainer ranks, and higher than in every earlier ``Place``, also of the same number."""


class Placed(Message, frozen=True):
    """Digest of every row of the published layout (uint64, little-endian), computed from the rank's own memory while it placed."""

    digests: bytes
    seconds: Seconds
    changed: Annotated[tuple[ChangedWords, ...], Few] = ()  # since earlier versions, where that is listed


class DigestUnderKey(Message, frozen=True):
    """Digest the published region, which holds this version, with constants from a secret key. Answered by :class:`Placed`.

    Fails with StaleSource if the region does not hold the version any more.
    """

    number: Number
    epoch: Epoch
    key: DigestKey

    def __repr__(self) -> str:
        return f"<DigestUnderKey of version {self.number}>"  # the key must not reach logs


class PlaceWindow(Message, frozen=True):
    """Place window ``window`` of the stream that is version ``number``, when it is full. Answered by :class:`WindowPlaced`.

    A rank places every window whose number is its own rank modulo the trainer's world size.
    """

    number: Number
    epoch: Epoch
    window: Number
    released: Number
    """Windows before this one are not read any more."""
    window_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    """Most bytes of a window, equal on all ranks in all windows of a stream."""
    call: _Call = 0
    """As in :class:`Place`."""


class WindowPlaced(Message, frozen=True):
    """A window, or, without parts, the end of the stream: there is no such window."""

    parts: Annotated[tuple[WindowPart, ...], Many] = ()
    nbytes: int = 0
    offset: int = 0
    """Bytes from the beginning of the rank's region to the window."""
    stamp: Number = 0
    """Version number under which the rank's region is readable during this stream."""
    digests: bytes = b""
    """Digest of every part (uint64, little-endian)."""
    windows: Number = 0
    """At the end: windows of the stream, of all ranks."""
    manifest: Name = ""
    """At the end: fingerprint of all tensors of the stream, of all ranks."""
    sample: Annotated[bytes, msgspec.Meta(max_length=1 << 23)] = b""
    """At the end, of one of several ranks: digests (uint64, little-endian) of its tensors, see :mod:`weightsync.model.window`."""


# Coordinator to engine.


class OpenStream(Message, frozen=True):
    """Prepare for windows from these trainer ranks while still serving: connect, allocate. Answered by :class:`Prepared`."""

    key: Name
    """Names what is prepared; it is the digest of the answer."""
    sources: Annotated[tuple[SourceAddress, ...], Many]
    window_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class MoveWindow(Message, frozen=True):
    """Fetch a window from source ``source`` and hand its tensors to the loader. Answered by :class:`WindowMoved`.

    The loader may still be at the window before when the answer comes, and at this one until the next window's or the end's.
    """

    window: Number
    source: Annotated[int, msgspec.Meta(ge=0)]
    placed: WindowPlaced


class WindowMoved(Message, frozen=True):
    """Digest of every part of the window (uint64, little-endian), of what arrived."""

    digests: bytes


class EndStream(Message, frozen=True):
    """All windows have come. Answered by :class:`Moved`, with a digest for each tensor of the stream's manifest."""

    manifest: Name
    """The manifest's fingerprint."""


class KeepLayout(Message, frozen=True):
    """A round begins: a rank with :attr:`Hello.moves` keeps its layout until it resumes, or until this call's time is over.

    ``layout`` is the digest of the layout that the coordinator knows. Answered by :class:`LayoutKept`.
    """

    layout: Name


class LayoutKept(Message, frozen=True):
    """The layout that the rank keeps, if it is another than the coordinator's."""

    layout: LayoutColumns | None = None


class Prepare(Message, frozen=True):
    """Prepare for this plan while still serving: connect, allocate staging, build copy tables. Answered by :class:`Prepared`."""

    plan: PlanSlice


class Prepared(Message, frozen=True):
    """Digest of the plan as the engine rank decoded it, and the transport chosen for each source."""

    digest: Name
    transports: Annotated[tuple[Name, ...], Many]


class CheckSources(Message, frozen=True):
    """Check, while still serving, that this version can be read. Answered by :class:`Done`, or fails with StaleSource.

    Sent before a replica is re-seeded, so that a serving replica is not paused for a version that is gone.
    """

    number: Number


class LetGo(Message, frozen=True):
    """The trainer is gone: disconnect from its memory, which would stay in use, and free the staging. The engine serves on."""

    adapters: bool = False  # only a rank that publishes adapters is gone


class Audit(Message, frozen=True):
    """Compare the parameters with what was installed of this version, while serving.

    Answered by :class:`Done`, or fails with VerificationError. Every other call ends it, and it never waits for another.
    """

    version: Version


class Pause(Message, frozen=True):
    """Stop generation. Answered by :class:`Done` once no step runs.

    ``epoch`` and ``number`` are those of the version that comes next, for engines whose owner asks for certain versions.
    """

    mode: PauseMode
    number: Number | None = None
    epoch: Epoch = FIRST_EPOCH


class Move(Message, frozen=True):
    """Fetch this version's bytes into place and compute the digests of what was installed. Answered by :class:`Moved`.

    A replica that reads from another replica gets a ``key``: its digests are then taken with constants from that key, which the
    source does not know. Only this replica gets the key, and it is used once.
    """

    number: Number
    key: DigestKey = b""
    staged: bool = False
    """Apply the changes that were staged, if the parameters are still where they were then."""

    def __repr__(self) -> str:
        return f"<Move of version {self.number}>"  # the key must not reach logs


class Moved(Message, frozen=True):
    """Digest of every row of the plan's layout (uint64, little-endian), read back from the engine's memory after the copy."""

    nbytes: int
    digests: bytes
    receive_seconds: Seconds
    load_seconds: Seconds
    digest_seconds: Seconds
    verified: Literal["installed", "received"]
    """Whether the digests are of the parameters themselves, or of the tensors that were passed to an opaque loader."""
    reason: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Why an adapter is only received."""


class Commit(Message, frozen=True):
    """The bytes are verified: finish loading, flush caches and check that this succeeded, take the version label."""

    version: Version


class Resume(Message, frozen=True):
    """Resume generation."""


class Update(Message, frozen=True):
    """Pause, move, verify, commit and resume. Sent to a replica of a single rank, which has no other rank to wait for.

    The rank compares what it installed with the version's digest itself. Answered by :class:`Updated`.
    """

    version: Version
    mode: PauseMode
    staged: bool = False
    """Whether to move only what the last :class:`Stage` prepared, as in :class:`Move`."""


class Updated(Message, frozen=True):
    """Outcome of an update. If not ``committed``, the installed bytes differ from the published ones and the rank stays paused."""

    moved: Moved
    committed: bool
    pause_seconds: Seconds
    commit_seconds: Seconds
    """Seconds for commit and resume."""


class Quarantine(Message, frozen=True):
    """Go out of service: abort the running update and stay paused, without a version, until a later round."""

    reason: Annotated[str, msgspec.Meta(max_length=1 << 20)]


# Agent to coordinator.


class Publish(Message, frozen=True):
    """A trainer rank is ready to publish this number (``None``: the next one). Answered by :class:`Published`."""

    number: Number | None = None
    call: _Call = 0
    """Identifies this call of ``publish()``. A repeated value means that the connection broke before the answer arrived."""
    step: Step = None
    """The training framework's own count, equal on all ranks that give one."""
    pause_mode: PauseMode | None = None
    """What the round's pause does to running requests, equal on all ranks. ``None``: the coordinator's default."""
    placed: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    """Number under which this call has placed its shards already, for a coordinator that is gone perhaps; -1 if it has not."""
    count: _Count = 0
    """Ordinal of this call: among those without ``step``, or those in a row with this ``step``. Without ``number``, calls with
    an equal step and count belong together. 0 if nothing was counted."""
    above: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    """Highest number that earlier calls of this process have placed. It may be served, as far as a new coordinator knows."""
    adapter: AdapterSpec | None = None
    """The LoRA adapter whose version this is, equal on all ranks."""
    version: Version | None = None
    """A relay's: what ``number`` must become, by a signature. It may be the last one again, for replicas that came since."""


class CannotPublish(Message, frozen=True):
    """A trainer rank failed before it could ask to publish, so the other ranks must not wait for it. Answered by :class:`Done`."""

    number: Number | None
    kind: Name
    message: Annotated[str, msgspec.Meta(max_length=4000)]
    step: Step = None
    count: _Count = 0
    """As in :class:`Publish`."""
    adapter: Name = ""
    """Name of the LoRA adapter that it cannot publish; empty for the base weights."""


class EndCall(Message, frozen=True):
    """A framework's call of its engine ends without an update. Passed on to all engine ranks. Answered by :class:`Done`."""

    call: _Call
    """Random number of the framework's call."""
    reason: Annotated[str, msgspec.Meta(max_length=4000)]
    refuse: bool = False
    """The call failed, and the publication goes on: the pause that waits for it is refused."""


class WaitForReplicas(Message, frozen=True):
    """A trainer rank waits until ``count`` replicas, ``names`` among them, are ready. Answered by :class:`ReplicaList`."""

    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)] = ()
    refused: Literal["wait", "raise"] = "wait"
    """Whether a replica that is refused fails the wait at once, or another one may still come."""


class Refuted(Message, frozen=True):
    """Parameters of this engine rank are not what it installed of ``version``. It reports no version until the next update."""

    version: Version
    reason: Text


class ReplicaList(Message, frozen=True):
    """Replicas that are ready for rounds."""

    names: Annotated[tuple[Name, ...], Many]


class Published(Message, frozen=True):
    """Result of the round that a publication started."""

    result: RoundResult


class CountOn(Message, frozen=True):
    """Instead of :class:`Published`, to a process that could not know what the others count: it asks again as call ``count``."""

    count: _Count


class Done(Message, frozen=True):
    """A call succeeded without a result."""


Body = (
    Place | Placed | DigestUnderKey | KeepLayout | LayoutKept | Prepare | Prepared | CheckSources | LetGo | Audit | Pause | Move |
    Moved | Commit | Resume | Update | Updated | PlaceWindow | WindowPlaced | OpenStream | MoveWindow | WindowMoved | EndStream |
    Quarantine | Publish | CannotPublish | EndCall | Published | CountOn | WaitForReplicas | ReplicaList | Refuted | Done |
    DeltaMessage | UpdateMessage | StoreMessage | LoraMessage
)  # fmt: skip


class Timing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """When a call ran, by the clock of the process that answered it. With the caller's own times this aligns the two clocks."""

    received: Clock
    answered: Clock
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=MOST_SPANS)] = ()


class Call(Message, frozen=True):
    """A request that must be answered within ``timeout`` seconds of its arrival."""

    id: int
    timeout: Seconds
    body: Body
    trace: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The trace that the call belongs to, as a W3C ``traceparent``. If it is not empty, the answer carries a :class:`Timing`."""
    update: Number = 0
    """The update from outside that the call belongs to, a random number. 0 in rounds, where a connection keeps calls in order."""


class Answer(Message, frozen=True):
    """Result of the call with this id."""

    id: int
    body: Body
    timing: Timing | None = None


class Failure(Message, frozen=True):
    """The call with this id failed. ``kind`` is an error's class name."""

    id: int
    kind: Name
    message: Text
    timing: Timing | None = None


class Cancel(Message, frozen=True):
    """The caller no longer waits for the call with this id."""

    id: int


class Progress(Message, frozen=True):
    """An engine rank has ``nbytes`` of the running move in place."""

    nbytes: Number


class Notice(Message, frozen=True):
    """Text for the agent's log, such as what a call waits for, or why rounds leave a replica out. Needs no answer."""

    text: Annotated[str, msgspec.Meta(max_length=4000)]


Frame = Hello | Welcome | Confirmed | Refused | Call | Answer | Failure | Cancel | Progress | Notice

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """Encode one frame as MessagePack."""
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    """Decode one frame.

    Raises:
        ProtocolError: ``data`` is not exactly one well-formed frame.
    """
    try:  # not decoding(), which takes longer than to decode most frames
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"not a weightsync frame: {readable(str(error), 500)}") from None
