"""What crosses a process between an agent and the coordinator, typed. MessagePack frames of tagged structs; nothing is executed.

An **agent** (one a trainer or engine rank) opens the connection and says :class:`Hello`; the coordinator answers
:class:`Welcome` or :class:`Refused`. From then on either side sends :class:`Call` and gets exactly one :class:`Answer` or
:class:`Failure` with the same id; :class:`Cancel` withdraws a call whose asker gave up. :class:`Progress` and
:class:`Notice` need no answer.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightsync.errors import ProtocolError, readable
from weightsync.model.layout import LayoutColumns
from weightsync.model.manifest import TensorSpec
from weightsync.model.pause import PauseMode
from weightsync.model.result import ReplicaResult, RoundResult
from weightsync.model.version import FIRST_EPOCH, Version

__all__ = [
    "PROTOCOL",
    "UNREADABLE",
    "Answer",
    "Body",
    "Call",
    "Cancel",
    "CannotPublish",
    "CheckSources",
    "Commit",
    "Confirmed",
    "Delivery",
    "Done",
    "Failure",
    "Frame",
    "Hello",
    "Host",
    "Memory",
    "Move",
    "Moved",
    "Notice",
    "Offer",
    "Pause",
    "PieceColumns",
    "Place",
    "Placed",
    "PlanSlice",
    "Prepare",
    "Prepared",
    "Progress",
    "Publish",
    "Published",
    "Quarantine",
    "Reach",
    "Refused",
    "ReplicaList",
    "ReplicaResult",
    "Resume",
    "RoundResult",
    "SourceAddress",
    "Traits",
    "Update",
    "Updated",
    "WaitForReplicas",
    "Welcome",
    "decode",
    "encode",
]

PROTOCOL = 5
"""Version of this file. An agent and a coordinator that differ refuse each other with a message that names both."""

UNREADABLE: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be. Only the first is in its documentation: catch all three."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Of a version; shelves hold it as an int64."""
_Epoch = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
_Few = msgspec.Meta(max_length=64)
_Many = msgspec.Meta(max_length=1 << 20)
"""Of what there is one of for each rank or tensor. MessagePack says a count before the items: beyond this it is not read on."""
_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""As long as an error's message gets (:func:`weightsync.errors.readable`)."""

Delivery = Literal["auto", "direct", "streamed"]


class _Struct(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages: immutable, tagged with the class name, strict."""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank runs. Two ranks with equal ``memory`` can share memory; equal ``name`` means the same machine."""

    name: _Name
    memory: _Name


Memory = Literal["host", "cuda"]
Reach = Literal["process", "host", "network"]


class Traits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a transport can do. It travels in every offer, so that nobody decides by a transport's name.

    Attributes:
        reads: The memories of a publisher that readers can get bytes from.
        writes: The memories that a reader can put bytes into.
        reach: How far apart a publisher and its readers may be: in one process, on one host, or anywhere.
        encrypted: Bytes on the network are encrypted. A transport that leaves it to its settings says that it can, its offer
            whether it does.
        digests: A reader computes digests while it writes ("inline"), or the caller does it in a later pass ("after").
        live_source: Readers read the publisher's memory themselves, so it must live, and must not change meanwhile.
        shared_fate: A reader that stops holds up the others. Such a transport is used only where it is named.
    """

    reads: Annotated[tuple[Memory, ...], _Few] = ("host",)
    writes: Annotated[tuple[Memory, ...], _Few] = ("host",)
    reach: Reach = "network"
    encrypted: bool = False
    digests: Literal["inline", "after"] = "inline"
    live_source: bool = False
    shared_fate: bool = False


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to reach a trainer rank's shards: a transport's name and its address, which only that transport understands."""

    scheme: _Name
    address: _Text
    host: Host
    traits: Traits = Traits()


class SourceAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer rank in a plan: who, which layout the plan was made for, and how to reach it, best first."""

    member: str
    layout_digest: str
    offers: Annotated[tuple[Offer, ...], _Few]
    key: bytes = b""
    """The owner's secret: who knows it may read. Never logged, never in a status, not in a ``repr``."""

    def __repr__(self) -> str:
        return f"<SourceAddress of {self.member}>"


class PieceColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pieces that one target rank receives, as little-endian columns; :mod:`weightsync.planning` says what they mean."""

    rows: int
    dims: int
    source: bytes
    source_region: bytes
    source_offset: bytes
    source_strides: bytes
    target_row: bytes
    starts: bytes
    stops: bytes


class PlanSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine rank needs to know of a plan: its pieces, where they come from, and the layout that they fill.

    ``layout`` is the engine's own for direct delivery. For streamed delivery it is the staging: region ``k`` is bucket ``k``,
    and each row is a whole tensor.
    """

    digest: str
    delivery: Literal["direct", "streamed"]
    reason: str
    """Why this delivery was chosen, for people."""
    sources: Annotated[tuple[SourceAddress, ...], _Many]
    layout: LayoutColumns
    pieces: PieceColumns
    nbytes: int


# Agent to coordinator, first frame.


class Hello(_Struct, frozen=True):
    """An agent introduces its rank. ``session`` is random per process, so a restarted rank is told from a reconnecting one."""

    protocol: int
    run: _Name
    role: Literal["trainer", "engine"]
    name: _Name
    """The replica's name; for a trainer, ``"trainer"``."""
    rank: int
    world_size: int
    session: _Name
    host: Host
    pid: int
    manifest: Annotated[tuple[TensorSpec, ...], _Many]
    layout: LayoutColumns | None = None
    """Needed from trainers; an engine without one can only be streamed to."""
    no_layout: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Why this engine rank has none, for people."""
    device_memory: bool = False
    """The layout is in GPU memory, which only ``cuda_ipc`` writes; and where that does not reach, this rank can be streamed to."""
    offers: Annotated[tuple[Offer, ...], _Few] = ()
    key: Annotated[bytes, msgspec.Meta(max_length=1024)] = b""
    """A trainer rank's secret for its data sockets, random per process; engines get it with their plan."""
    transports: Annotated[tuple[_Name, ...], _Few] = ()
    """Schemes that this engine rank can and may read with, best first."""
    delivery: Delivery = "auto"
    bucket_bytes: int = 0
    adapter: _Name = ""
    serving: Version | None = None
    """What this engine rank serves already, after a coordinator's restart."""
    published: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    """The last version number that this trainer rank published, after a coordinator's restart."""
    live: bool = False
    """This trainer rank's own memory is read in place: a version can be read until its publication is over, and no later."""
    epoch: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] = 0
    """The epoch in which this trainer rank publishes; 0 until the coordinator has said it with the first :class:`Place`."""
    new_epoch: bool = False
    """Whether this trainer rank was made with ``new_epoch=True``."""
    version: Version | None = None
    """The last version that this trainer rank published. By its digest a restarted coordinator tells which engines are right."""
    credential: _Name = ""
    """From the last :class:`Welcome`; who reconnects before the coordinator saw the old connection end needs it."""

    def __repr__(self) -> str:
        return f"<Hello of {self.role} {self.name}/{self.rank}>"  # key and credential are not for logs


class Welcome(_Struct, frozen=True):
    """The coordinator takes the agent in."""

    member: str
    run: str
    last: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    """For a trainer rank: the highest version number of its epoch that is known."""
    refusal: str = ""
    """For an engine rank: why no round takes its replica in, though it is connected."""
    credential: _Name = ""
    """Random. While this rank is connected, only who shows it can take its place."""

    def __repr__(self) -> str:
        return f"<Welcome of {self.member}>"


class Confirmed(_Struct, frozen=True):
    """The agent has its :class:`Welcome`: from now on its place needs the credential in it. Needs no answer."""


class Refused(_Struct, frozen=True):
    """The coordinator does not take the agent in; ``kind`` is an error's class name."""

    kind: _Name
    message: _Text


# Bodies of calls, coordinator to trainer.


class Place(_Struct, frozen=True):
    """Copy the shards to where readers find them, under this number; answered by :class:`Placed`."""

    number: _Number
    epoch: _Epoch = FIRST_EPOCH
    """What the number belongs to; a trainer rank reports it when it connects again."""


class Placed(_Struct, frozen=True):
    """Digest of every row of the trainer rank's layout (uint64, little-endian), taken from its own memory while placing."""

    digests: bytes
    seconds: float


# Coordinator to engine.


class Prepare(_Struct, frozen=True):
    """Get ready for this plan while still serving: connect, allocate staging, build copy tables."""

    plan: PlanSlice


class Prepared(_Struct, frozen=True):
    """Digest of the plan as the engine rank understood it, and the transport chosen for each source."""

    digest: _Name
    transports: Annotated[tuple[_Name, ...], _Many]


class CheckSources(_Struct, frozen=True):
    """Look, while still serving, whether this version can be read; answered by :class:`Done`, or StaleSource.

    Asked before a replica is re-seeded: one that serves is not taken out of service for bytes that nobody holds any more.
    """

    number: _Number


class Pause(_Struct, frozen=True):
    """Stop generating; answered when no step runs any more."""

    mode: PauseMode


class Move(_Struct, frozen=True):
    """Fetch this version's bytes into place and compute the digests of what was installed; answered by :class:`Moved`."""

    number: _Number


class Moved(_Struct, frozen=True):
    """Digest of every row of the plan's layout (uint64, little-endian), read back from the engine's memory after the copy."""

    nbytes: int
    digests: bytes
    receive_seconds: float
    load_seconds: float
    digest_seconds: float
    verified: Literal["installed", "received"]
    """Whether the digests are of the parameters themselves, or of what was handed to an opaque loader."""


class Commit(_Struct, frozen=True):
    """The bytes are right: finish loading, flush caches (and look at the answer), take the version's label."""

    version: Version


class Resume(_Struct, frozen=True):
    """Generate again."""


class Update(_Struct, frozen=True):
    """Pause, move, verify, commit and resume, to the only rank of a replica: it has nobody to wait for in between.

    The rank compares what it installed with the version's digest by itself; answered by :class:`Updated`.
    """

    version: Version
    mode: PauseMode


class Updated(_Struct, frozen=True):
    """An update came to its end, or (not ``committed``) to bytes that are not the version's: then the rank stays paused."""

    moved: Moved
    committed: bool
    pause_seconds: float
    commit_seconds: float
    """Of commit and resume."""


class Quarantine(_Struct, frozen=True):
    """Abort what is running and stay paused, without a version, until a later round."""

    reason: str


# Agent to coordinator.


class Publish(_Struct, frozen=True):
    """A trainer rank has weights to publish under this number (``None``: the next); answered by :class:`Published`."""

    number: _Number | None = None
    call: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Counts this rank's publications from 1: the same again means that the connection broke before the answer came."""


class CannotPublish(_Struct, frozen=True):
    """A trainer rank failed before it could ask to publish: the other ranks need not wait for it. Answered by :class:`Done`."""

    number: _Number | None
    kind: str
    message: Annotated[str, msgspec.Meta(max_length=4000)]


class WaitForReplicas(_Struct, frozen=True):
    """A trainer rank waits for so many replicas that rounds can take in; answered by :class:`ReplicaList`."""

    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class ReplicaList(_Struct, frozen=True):
    """The replicas that rounds can take in."""

    names: Annotated[tuple[str, ...], _Many]


class Published(_Struct, frozen=True):
    """The round that a publication caused."""

    result: RoundResult


class Done(_Struct, frozen=True):
    """A call succeeded and has nothing to say."""


Body = (
    Place | Placed | Prepare | Prepared | CheckSources | Pause | Move | Moved | Commit | Resume | Update | Updated |
    Quarantine | Publish | CannotPublish | Published | WaitForReplicas | ReplicaList | Done
)  # fmt: skip


class Call(_Struct, frozen=True):
    """A request that must be answered within ``timeout`` seconds of its arrival."""

    id: int
    timeout: float
    body: Body


class Answer(_Struct, frozen=True):
    """The outcome of the call with this id."""

    id: int
    body: Body


class Failure(_Struct, frozen=True):
    """The call with this id failed; ``kind`` is an error's class name."""

    id: int
    kind: _Name
    message: _Text


class Cancel(_Struct, frozen=True):
    """The asker no longer waits for the call with this id."""

    id: int


class Progress(_Struct, frozen=True):
    """An engine rank has this many bytes of the running move in place."""

    nbytes: int


class Notice(_Struct, frozen=True):
    """Something that the agent's log shall show: for whom a call waits, or why rounds leave a replica out. Needs no answer."""

    text: Annotated[str, msgspec.Meta(max_length=4000)]


Frame = Hello | Welcome | Confirmed | Refused | Call | Answer | Failure | Cancel | Progress | Notice

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """One frame as MessagePack."""
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    """The frame in ``data``. Raises :class:`~weightsync.errors.ProtocolError` for anything else than one well-formed frame."""
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"not a weightsync frame: {readable(str(error), 500)}") from None
