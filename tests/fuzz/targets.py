"""Every parser of what comes from outside, as functions of bytes that must return or raise one of weightsync's own errors.

Anything else that they raise is a finding: a peer, a checkpoint or a request could end a thread with it. Each target looks at what
was accepted, too: what passed the checks must be safe to use. ``seeds`` are well-formed inputs to start from.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import typer

from weightsync.cli.options import parse_size
from weightsync.config import Address, ClientSettings, Secret, ServerSettings
from weightsync.coordinator.agent_messages import rank_of
from weightsync.coordinator.negotiation import negotiate, source_coverage
from weightsync.coordinator.ranks import EngineRank, TrainerRank
from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, ConfigurationError, ProtocolError, WeightSyncError, from_wire
from weightsync.external.checkpoint_files import INDEX, CheckpointFiles
from weightsync.model import Layout, Manifest, TensorSpec, Version
from weightsync.model.layout import LayoutColumns
from weightsync.model.version import fold
from weightsync.planning.pieces import Pieces
from weightsync.protocol import messages
from weightsync.protocol.messages import PROTOCOL, Call, Hello, Host, Offer, PieceColumns, Prepare, SourceAddress
from weightsync.protocol.proof import Challenger, Claimant
from weightsync.protocol.tokens import matches
from weightsync.protocol.update_messages import JoinGroup, Receive
from weightsync.server.openapi import RoundRequest, decode_body
from weightsync.tensors.copies import check_tiles
from weightsync.tensors.copy_table import tiles_of
from weightsync.transports.cuda.region import Exported
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.host.shared_memory import SharedMemory, SharedMemoryReader
from weightsync.transports.net.channel import CONTROL, HEADER, Channel, FrameHeader
from weightsync.transports.net.handshake import greet_publisher, greet_reader
from weightsync.transports.net.messages import REQUEST_BYTES, RegisterTiles, Start, TableBudget, next_control
from weightsync.transports.tcp.transport import Sender, Tcp
from weightsync_disaggregated import requests
from weightsync_disaggregated.checks import check_bucket, check_digests, check_group, parse_version

__all__ = ["TARGETS", "Target"]

KEY = b"k" * 32
_OWNER = b"o" * 16
_HERE = Host("host", "memory")
_SPECS = (
    TensorSpec("layers.0.w", (4, 6, 2), "float32"),
    TensorSpec("layers.1.w", (8, 3), "bfloat16", ("tied",)),
    TensorSpec("scale", (), "float64"),
)
_MANIFEST = Manifest(_SPECS)
_SECONDS = 2.0


@dataclass(frozen=True)
class Target:
    """One parser."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]

    def run_quietly(self, data: bytes) -> None:
        """Run, where one of weightsync's own errors is as good as none."""
        with contextlib.suppress(WeightSyncError):
            self.run(data)


def _layout() -> Layout:
    tensor = np.arange(3, dtype=np.int32)
    stops = _MANIFEST.shapes.copy()
    strides = np.array([[48, 8, 4], [0, 6, 2], [0, 0, 8]], np.int64)
    return Layout(
        _MANIFEST,
        tensor,
        np.zeros((3, 3), np.int64),
        stops,
        np.zeros(3, np.int32),
        np.array([0, 192, 240], np.int64),
        strides,
        (248,),
    )


def _pieces() -> Pieces:
    layout = _layout()
    none = np.zeros(3, np.int32)
    return Pieces(("t/0",), none, none, layout.offset, layout.strides, np.arange(3, dtype=np.int32), layout.starts, layout.stops)


def _plan() -> messages.PlanSlice:
    pieces = _pieces()
    source = SourceAddress("t/0", _layout().digest, (Offer("tcp", "h:1/" + "00" * 16, _HERE),), KEY)
    return messages.PlanSlice(pieces.digest, "direct", "why", (source,), _layout().to_columns(), pieces.to_columns(), 248)


def _hello(role: str) -> Hello:
    trainer = role == "trainer"
    return Hello(
        protocol=PROTOCOL,
        run="run",
        role="trainer" if trainer else "engine",
        name="trainer" if trainer else "a",
        rank=0,
        world_size=1,
        session="s",
        host=_HERE,
        pid=1,
        manifest=_MANIFEST.tensors,
        layout=_layout().to_columns(),
        offers=(Offer("tcp", "h:1/" + "00" * 16, _HERE),) if trainer else (),
        key=KEY if trainer else b"",
        serving=None if trainer else Version("run", 3, "0a", "0d"),
    )


def _frames(data: bytes) -> None:
    """A frame of an agent's socket; what it says of a rank or a plan is checked, and used as the real code uses it."""
    frame = messages.decode(data)
    if messages.decode(messages.encode(frame)) != frame:
        raise AssertionError("a frame is not what it was after a round trip")
    repr(frame)
    if isinstance(frame, Hello):
        rank = rank_of(frame, frame.run)
        rank.manifest.fingerprint.encode()
        rank.manifest.shapes.sum()
        if rank.layout is not None:
            rank.layout.nbytes(rank.manifest)
    elif isinstance(frame, messages.Refused | messages.Failure):
        raise from_wire(frame.kind, frame.message)
    elif isinstance(frame, Call) and isinstance(frame.body, Prepare):
        _use_plan(_MANIFEST, frame.body.plan.layout, frame.body.plan.pieces, len(frame.body.plan.sources))


def _use_plan(manifest: Manifest, layout_columns: LayoutColumns, piece_columns: PieceColumns, sources: int) -> None:
    layout = Layout.from_columns(manifest, layout_columns)
    pieces = Pieces.from_columns(manifest, layout, sources, piece_columns)
    if sum(layout.regions) > 1 << 20 or len(layout) == 0:
        return  # a real rank has the memory that its layout speaks of; the rest of this is about writing into it
    bases = [1 << 40] * len(layout.regions)
    tiles = tiles_of(manifest, pieces, layout, bases, [(0, len(layout))])
    for group in (group for source in tiles for group in source):
        ends = group.target + (group.rows - 1) * group.target_stride + group.row_bytes - (1 << 40)
        if len(group) and (group.target.min() < 1 << 40 or ends.max() > max(layout.regions)):
            raise AssertionError("a plan that passed the checks writes outside the layout's memory")
        check_tiles(group, (1 << 20,) * 4)


def _plans(data: bytes) -> None:
    """Columns of a layout and of pieces, as raw numbers: MessagePack around them would only slow the search down."""
    rows, count = (data[0] % 4, data[1] % 4) if len(data) > 1 else (0, 0)
    rest = data[2:]
    dims = _MANIFEST.dims

    def take(nbytes: int) -> bytes:
        nonlocal rest
        taken, rest = rest[:nbytes].ljust(nbytes, b"\0"), rest[nbytes:]
        return taken

    regions = struct.unpack("<2Q", take(16))
    layout = LayoutColumns(
        rows, dims, take(4 * rows), take(8 * dims * rows), take(8 * dims * rows), take(4 * rows), take(8 * rows),
        take(8 * dims * rows), regions,
    )  # fmt: skip
    pieces = PieceColumns(
        count, dims, take(4 * count), take(4 * count), take(8 * count), take(8 * dims * count), take(4 * count),
        take(8 * dims * count), take(8 * dims * count),
    )  # fmt: skip
    _use_plan(_MANIFEST, layout, pieces, 1)


def _plan_seed() -> bytes:
    a, b = _layout().to_columns(), _pieces().to_columns()
    body = a.tensor + a.starts + a.stops + a.region + a.offset + a.strides
    body += b.source + b.source_region + b.source_offset + b.source_strides + b.target_row + b.starts + b.stops
    return bytes([3, 3]) + struct.pack("<2Q", 248, 0) + body


def _agreements(data: bytes) -> None:
    """Layouts of two trainer ranks and an engine rank that lie: what is agreed on has each of the engine's bytes once.

    What is in a Hello besides is the business of ``frames``.
    """
    columns, rest = [], data
    for _ in range(3):
        rows, rest = (rest[0] % 4, rest[1:]) if rest else (0, b"")
        boxes = 8 * _MANIFEST.dims * rows
        parts = []
        for size in (4 * rows, boxes, boxes, 4 * rows, 8 * rows, boxes, 16):
            parts.append(rest[:size].ljust(size, b"\0"))
            rest = rest[size:]
        regions = struct.unpack("<2Q", parts.pop())
        tensor, starts, stops, region, offset, strides = parts
        columns.append(LayoutColumns(rows, _MANIFEST.dims, tensor, starts, stops, region, offset, strides, regions))
    hellos = [msgspec.structs.replace(_hello("trainer"), layout=columns[rank], rank=rank, world_size=2) for rank in range(2)]
    trainers = {found.member: found for found in (rank_of(hello, "run") for hello in hellos) if isinstance(found, TrainerRank)}
    engine = rank_of(msgspec.structs.replace(_hello("engine"), layout=columns[2]), "run")
    if not isinstance(engine, EngineRank) or engine.layout is None or len(trainers) != 2:
        raise AssertionError("a rank is not what it says")
    source_coverage(_MANIFEST, trainers, "the trainer")
    (found,) = negotiate("a", trainers, {engine.member: engine}).slices.values()
    if found.nbytes != _MANIFEST.nbytes or found.nbytes != engine.layout.nbytes(_MANIFEST):
        raise AssertionError("a plan was agreed on that does not move every byte once")
    Pieces.from_columns(_MANIFEST, engine.layout, 2, found.pieces)


def _agreement_seed() -> bytes:
    def columns(rows: int, layout: LayoutColumns, regions: tuple[int, int]) -> bytes:
        parts = (layout.tensor, layout.starts, layout.stops, layout.region, layout.offset, layout.strides)
        each = [part[: rows * len(part) // 3] for part in parts]
        return bytes([rows]) + b"".join(each) + struct.pack("<2Q", *regions)

    whole = _layout().to_columns()
    return columns(3, whole, (248, 0)) + columns(0, whole, (0, 0)) + columns(3, whole, (248, 0))


def _manifests(data: bytes) -> None:
    """What a peer says that its tensors are."""
    try:
        specs = msgspec.json.decode(data, type=tuple[TensorSpec, ...])
    except messages.UNREADABLE:
        return
    manifest = Manifest(specs)
    if manifest.shapes.min(initial=0) < 0 or manifest.nbytes < 0:
        raise AssertionError("a manifest has negative sizes")
    if Manifest(reversed(manifest.tensors)).fingerprint != manifest.fingerprint:
        raise AssertionError("the fingerprint depends on the order")


@contextlib.contextmanager
def _said(data: bytes) -> Iterator[Channel]:
    """A channel whose peer has said ``data`` and gone."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(_SECONDS)
        theirs.sendall(data[: 1 << 15])
        theirs.shutdown(socket.SHUT_WR)
        yield Channel(ours, "the fuzzer")


def _reader_greeting(data: bytes) -> None:
    """A stranger at the owner's door: nothing but the key gets in."""
    with _said(data) as channel:
        greet_reader(channel, KEY, _OWNER, Deadline(_SECONDS))
        raise AssertionError("somebody without the key was let in")


def _owner_greeting(data: bytes) -> None:
    """Somebody who answers as an owner to a reader that carries the key."""
    with _said(data) as channel:
        greet_publisher(channel, KEY, _OWNER, Deadline(_SECONDS))
        raise AssertionError("somebody without the key was believed to be the owner")


@cache
def _region() -> PublishedRegion:
    return PublishedRegion(4096, "layout")


def _wanted(data: bytes) -> None:
    """What a reader that has the key asks an owner for."""
    with _said(data) as channel:
        Sender(_region(), channel, TableBudget(0), contextlib.nullcontext).run()


def _control(request: RegisterTiles | Start, rest: bytes = b"") -> bytes:
    body = msgspec.msgpack.encode(request)
    return FrameHeader(CONTROL, nbytes=len(body)).pack() + body + rest


def _tables(data: bytes) -> None:
    """Tables of tiles as raw numbers, past the frame and the MessagePack."""
    with _said(b"") as channel:
        sender = Sender(_region(), channel, TableBudget(0), contextlib.nullcontext)
        size = 8 * (data[0] if data else 0)
        sender._remember(RegisterTiles("layout", data[1 : 1 + size], data[1 + size :]))
        table = sender._tiles
        ends = table.source + (table.rows - 1) * table.source_stride + table.row_bytes
        if len(table) and (table.source.min() < 0 or ends.max() > 4096):
            raise AssertionError("a table that passed the checks reads outside the region")
        if int(sender._frames[:, 4].sum()) != table.nbytes:
            raise AssertionError("the frames of a table do not add up")


def _answers(data: bytes) -> None:
    """The first frame of an owner's answer."""
    if len(data) >= HEADER.size:
        FrameHeader.unpack(data[: HEADER.size])
    with _said(data) as channel:
        next_control(channel, REQUEST_BYTES, Deadline(_SECONDS))


def _descriptors(data: bytes) -> None:
    """What a process that has the key says of the memory that it hands over."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            socket.send_fds(theirs, [data[:600] or b"\0"], [fd])
        finally:
            os.close(fd)
        SharedMemoryReader(Channel(ours, "the fuzzer"), Deadline(_SECONDS)).close()


def _device(data: bytes) -> None:
    """What the owner of GPU memory says of it; no GPU is needed to check it."""
    try:
        found = msgspec.msgpack.decode(data, type=Exported)
    except messages.UNREADABLE:
        return
    number, offset, size = found.regions()
    for one, at, length in zip(number.tolist(), offset.tolist(), size.tolist(), strict=True):
        if at < 0 or length < 0 or at + length > found.sizes[one]:
            raise AssertionError("a region leaves its allocation")


def _offers(data: bytes) -> None:
    """Addresses by which a trainer rank says that it can be reached."""
    offer = Offer("tcp", data.decode("utf-8", "replace"), _HERE)
    Tcp().reaches(offer, _HERE)
    SharedMemory().reaches(offer, _HERE)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        yield Path(name)


def _read_all(checkpoint: CheckpointFiles) -> None:
    with checkpoint:
        for spec in checkpoint.manifest:
            if spec.nbytes > 1 << 20:
                raise AssertionError("a tensor is larger than the whole file")
            checkpoint.read([spec], np.empty(spec.nbytes, np.uint8))


def _safetensors(data: bytes) -> None:
    """One file of a checkpoint."""
    with _folder() as folder:
        (folder / "model.safetensors").write_bytes(data)
        _read_all(CheckpointFiles(folder))


def _header(data: bytes) -> None:
    """The JSON of a file's header, with a length and a body that fit."""
    with _folder() as folder:
        (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))
        _read_all(CheckpointFiles(folder))


def _index(data: bytes) -> None:
    """The index of a sharded checkpoint."""
    with _folder() as folder:
        (folder / INDEX).write_bytes(data)
        (folder / "a.safetensors").write_bytes(_file({"w": ("F32", [2, 2], [0, 16])}, 16))
        checkpoint = CheckpointFiles(folder)
        if any(place.path.resolve().parent != folder.resolve() for place in checkpoint._places.values()):
            raise AssertionError("a file outside the directory was opened")
        _read_all(checkpoint)


def _file(tensors: dict[str, tuple[str, list[int], list[int]]], size: int) -> bytes:
    header = {name: {"dtype": d, "shape": s, "data_offsets": o} for name, (d, s, o) in tensors.items()}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


_KINDS = (
    requests.InitGroupRequest, requests.UpdateRequest, requests.DestroyRequest, requests.BeginRequest,
    requests.CommitRequest, requests.EndRequest, requests.AbortRequest,
)  # fmt: skip


def _updates(data: bytes) -> None:
    """Bodies of the routes of a disaggregated update."""
    kind, body = _KINDS[(data[0] if data else 0) % len(_KINDS)], data[1:]
    try:
        wish = msgspec.json.decode(body, type=kind)
    except messages.UNREADABLE:
        return
    if isinstance(wish, requests.InitGroupRequest):
        check_group(wish, 2, ("taken",), ("nccl", "gloo"))
    if isinstance(wish, requests.BeginRequest | requests.CommitRequest | requests.UpdateRequest):
        parse_version(wish.weight_version, "run", 3)
    if isinstance(wish, requests.UpdateRequest):
        for packing in ("elements", "bytes"):
            if sum(_MANIFEST[index].nbytes for index in check_bucket(wish, _MANIFEST, 1 << 20, packing)) > _MANIFEST.nbytes:
                raise AssertionError("a bucket is larger than the model")
    if isinstance(wish, requests.UpdateRequest | requests.CommitRequest):
        check_digests(_MANIFEST, np.zeros(3, np.uint64), np.ones(3, np.bool_), wish.digest, wish.digests)


_VARIABLES = [
    f"WEIGHTSYNC_{field.upper()}"
    for kind in (ServerSettings, ClientSettings)
    for field in kind.__struct_fields__
    if field != "token"
] + ["WEIGHTSYNC_TOKEN", "WEIGHTSYNC_AGENTS", "WEIGHTSYNC_FRAME_BYTES"]


_CHALLENGER = Challenger(Secret("the-token"))


def _settings(data: bytes) -> None:
    """Variables of the environment, addresses, sizes, headers."""
    which, text = data[:1], data[1:].decode("utf-8", "replace").replace("\0", "")
    environment = {_VARIABLES[(which or b"\0")[0] % len(_VARIABLES)]: text}
    for load in (ServerSettings.load, ClientSettings.load):
        with contextlib.suppress(ConfigurationError):
            load(environment)
    with contextlib.suppress(ConfigurationError):
        address = Address.parse(text)
        if Address.parse(address.url) != address or any(c.isspace() or not c.isprintable() for c in address.url):
            raise AssertionError(f"{address.url!r} is not an address")
    with contextlib.suppress(ConfigurationError):
        Secret(text)
    with contextlib.suppress(typer.BadParameter):
        if not 1 <= parse_size(text) < 1 << 63:
            raise AssertionError("not a size")
    if (
        matches(text, Secret("the-token"))
        and text.split() != ["Bearer", "the-token"]
        and text.lower().split() != ["bearer", "the-token"]
    ):
        raise AssertionError("another header passed for the token")
    if _CHALLENGER.admits(text, "GET /") is not None:
        raise AssertionError("a header passed for a proof of the token")
    with contextlib.suppress(ConfigurationError):
        _CHALLENGER.challenge(text)
    with contextlib.suppress(AuthenticationError, ProtocolError):
        Claimant(Secret("the-token"), Address("http", "host", 1)).accept(data)
        raise AssertionError("something else passed for the coordinator")


def _rounds(data: bytes) -> None:
    """The body of ``POST /v1/rounds``."""
    wanted = decode_body(data, RoundRequest, "a request for a round")
    if not isinstance(wanted, RoundRequest) or (wanted.timeout is not None and not wanted.timeout > 0):
        raise AssertionError("not a request")


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


_GROUP = requests.InitGroupRequest(master_address="h", master_port=1, rank_offset=1, world_size=3)
_UPDATE = requests.UpdateRequest(
    names=[spec.name for spec in _SPECS],
    dtypes=[spec.dtype for spec in _SPECS],
    shapes=[list(spec.shape) for spec in _SPECS],
    finished=True,
    digest=fold(np.zeros(3, np.uint64)),
    digests={spec.name: "0" * 16 for spec in _SPECS},
    weight_version="r@7",
)

_FRAMES: tuple[messages.Frame, ...] = (
    _hello("trainer"),
    _hello("engine"),
    Call(1, 2.0, Prepare(_plan())),
    Call(1, 2.0, messages.Publish(3)),
    Call(0, 3.0, JoinGroup("g", "gloo", "h", 1, 1, 2), update=7),
    Call(0, 3.0, Receive("g", (0, 1), flattened=True), update=7),
    messages.Refused("PeerLost", "gone"),
    messages.Progress(4),
    messages.Answer(1, messages.Moved(1, b"12345678", 0.0, 0.0, 0.0, "installed")),
    messages.Call(1, 1.0, messages.Update(Version("run", 1, "manifest", "digest"), "keep")),
    messages.Answer(1, messages.Updated(messages.Moved(1, b"12345678", 0.0, 0.0, 0.0, "installed"), True, 0.0, 0.0)),
)

TARGETS: dict[str, Target] = {
    "frames": Target(
        _frames,
        tuple(messages.encode(frame) for frame in _FRAMES),
    ),
    "plans": Target(_plans, (_plan_seed(),)),
    "agreements": Target(_agreements, (_agreement_seed(),)),
    "manifests": Target(_manifests, (_json(_SPECS),)),
    "reader-greeting": Target(_reader_greeting, (b"wsync\x00\x00\x03" + b"n" * 32 + b"p" * 32,)),
    "owner-greeting": Target(_owner_greeting, (b"wsync\x00\x00\x03" + _OWNER + b"n" * 32 + b"p" * 32 + b"\x01",)),
    "wanted": Target(
        _wanted,
        (
            _control(RegisterTiles("layout", struct.pack("<2q", 1, 1), struct.pack("<10q", 0, 0, 0, 1, 8, 0, 8, 16, 2, 8))),
            _control(Start(0, 1.0)),
        ),
    ),
    "tables": Target(_tables, (b"\x02" + struct.pack("<2q", 1, 1) + struct.pack("<10q", 0, 0, 0, 1, 8, 0, 8, 16, 2, 8),)),
    "answers": Target(_answers, (_control(Start(0, 1.0)),)),
    "descriptors": Target(_descriptors, (msgspec.msgpack.encode({"nbytes": 64, "layout_digest": "x"}),)),
    "device": Target(
        _device,
        (msgspec.msgpack.encode(Exported("p", 0, 1, "x", (b"h" * 64,), (1,), (0,), (64,), struct.pack("<3q", 0, 0, 64))),),
    ),
    "offers": Target(_offers, (b"[::1]:80/" + b"00" * 16, b"h:1/" + b"00" * 16 + b"/" + b"ab" * 32, b"weightsync-" + b"00" * 16)),
    "safetensors": Target(_safetensors, (_file({"a": ("F32", [2], [0, 8]), "b": ("U8", [3], [8, 11])}, 11),)),
    "header": Target(
        _header,
        (
            _file({"a": ("F32", [2, 4], [0, 32]), "b": ("BF16", [16], [32, 64])}, 0)[8:],
            b'{"__metadata__": {"format": "pt"}, "a": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}',
        ),
    ),
    "index": Target(_index, (_json({"metadata": {}, "weight_map": {"w": "a.safetensors"}}),)),
    "updates": Target(
        _updates, (b"\0" + _json(_GROUP), b"\1" + _json(_UPDATE), b"\3" + _json(requests.BeginRequest(weight_version="7")))
    ),
    "settings": Target(_settings, (b"\0http://[::1]:7400", b"\1" + b"8", b"\2" + b"1.5GiB", b"\3Bearer the-token")),
    "rounds": Target(_rounds, (b"{}", b'{"replicas": ["a"], "timeout": 2.5}')),
}
"""By name."""
