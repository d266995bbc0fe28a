"""Fillers without a GPU: what is in flight together, who digests, what an abort ends, and the order of work on streams."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.hellos import said
from tests.unit.engine.test_update import SECONDS, Watched

from weightsync.coordinator.negotiation import negotiate
from weightsync.coordinator.ranks import EngineRank, TrainerRank
from weightsync.deadline import Deadline
from weightsync.engine.engine_role import EngineRole, filler_for
from weightsync.engine.fill import receive_ahead
from weightsync.engine.fill.direct import DeviceDirect, HostDirect
from weightsync.engine.fill.receive_ahead import ReceiveAhead
from weightsync.engine.fill.streamed import DeviceStreamed, HostStreamed, LaunchAhead
from weightsync.engine.fill.windows import WindowFiller
from weightsync.errors import Aborted, LoadError, PeerLost, PlanMismatch, StaleSource
from weightsync.model import Manifest, TensorSpec
from weightsync.planning.buckets import staging_layout
from weightsync.protocol.messages import (
    Delivery,
    Host,
    Move,
    Moved,
    MoveWindow,
    Offer,
    OpenStream,
    Pause,
    Place,
    PlanSlice,
    Prepare,
    SourceAddress,
    WindowPlaced,
)
from weightsync.publishing.publication import ReaderAccess
from weightsync.tensors.digest import DigestConstants, digest_rows
from weightsync.tensors.staging import Staging
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.base import Completion, Reader
from weightsync.transports.host.inproc import InProcess
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host


class NotingReader(Reader):
    """Reads through another reader and notes what it is asked."""

    def __init__(self, reader: Reader, name: str, notes: list[str]) -> None:
        self.reader, self.name, self.notes = reader, name, notes

    def prepare(self, groups: Any, layout_digest: str, deadline: Deadline) -> None:
        self.reader.prepare(groups, layout_digest, deadline)

    def begin(self, version: int, deadline: Deadline) -> None:
        self.notes.append(f"begin {self.name}")
        self.reader.begin(version, deadline)

    def submit(self, group: int, deadline: Deadline, digests: npt.NDArray[np.uint64] | None = None) -> Completion:
        self.notes.append(f"submit {self.name} {'with' if digests is not None else 'without'} digests")
        return Noted(self, group, digests)

    def end(self, deadline: Deadline) -> None:
        self.notes.append(f"end {self.name}")
        self.reader.end(deadline)

    def abort(self) -> None:
        self.reader.abort()

    def close(self) -> None:
        self.notes.append(f"close {self.name}")
        self.reader.close()


class Noted:
    """The completion of a :class:`NotingReader`."""

    def __init__(self, reader: NotingReader, group: int, digests: npt.NDArray[np.uint64] | None) -> None:
        self.reader, self.group, self.digests = reader, group, digests

    def wait(self, deadline: Deadline) -> None:
        self.reader.notes.append(f"wait {self.reader.name}")
        self.reader.reader.read(self.group, deadline, self.digests)


class Noting(InProcess):
    """Opens readers that note what they are asked; ``opening`` runs before each is returned."""

    def __init__(self, **traits: Any) -> None:
        self.traits = msgspec.structs.replace(InProcess.traits, **traits)
        self.notes: list[str] = []
        self.opened = 0
        self.opening: Callable[[], None] = lambda: None

    def reaches(self, offer: Offer, here: Host) -> bool:
        return True

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> Reader:  # type: ignore[override]
        self.opened += 1
        self.opening()
        return NotingReader(super().open(offer, key, deadline), "ab"[self.opened - 1], self.notes)


class Two:
    """Two trainer ranks with equal copies, one engine rank that reads a part from each, and nobody in between."""

    def __init__(self, transport: Noting, owned: ExitStack, delivery: Delivery = "direct") -> None:
        here, self.transport = this_host(), transport
        self.source = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 6))
        self.adapter = Watched(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 6)))
        self.trainers = [TrainerRole(self.source, ReaderAccess([InProcess()], b"k" * 32, here)) for _ in range(2)]
        self.engine = EngineRole(self.adapter, [transport], here)
        owned.callback(self.engine.close)
        ranks = {}
        for index, role in enumerate(self.trainers):
            owned.callback(role.close)
            name = f"trainer/{index}"
            ranks[name] = TrainerRank(said("trainer", index, 2, here, offers=role.offers, key=role.key), role.manifest, role.layout)
        layout, manifest = self.engine.layout, self.engine.manifest
        target = EngineRank(said("r", 0, 1, here, transports=("inproc",), delivery=delivery, bucket_bytes=64), manifest, layout)
        self.plan: PlanSlice = negotiate("r", ranks, {"r/0": target}).slices["r/0"]

    def move(self, number: int) -> Moved:
        for role in self.trainers:
            role.arm(number, number)
            role.handle(Place(number, call=number), SECONDS)
        self.engine.handle(Pause("abort"), SECONDS)
        moved = self.engine.handle(Move(number), SECONDS)
        assert isinstance(moved, Moved)
        for ours, theirs in zip(self.adapter.module.parameters(), self.source.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        return moved

    @property
    def digests(self) -> bytes:
        parameters = self.engine._memory
        assert parameters is not None
        layout, addresses = parameters.layout, parameters.addresses
        digests = np.zeros(len(layout), np.uint64)
        digest_rows(self.engine.manifest, layout, addresses, 0, len(layout), digests)
        return digests.astype("<u8").tobytes()


@pytest.mark.parametrize("digests", ["inline", "after"])
def test_all_sources_are_asked_before_the_first_is_waited_for(digests: str) -> None:
    with ExitStack() as owned:
        two = Two(Noting(digests=digests), owned)
        two.engine.handle(Prepare(two.plan), SECONDS)
        assert isinstance(two.engine._filler, HostDirect)
        moved = two.move(1)
        how = "with" if digests == "inline" else "without"
        expected = [f"submit a {how} digests", f"submit b {how} digests", "wait a", "wait b", "end a", "end b"]
        assert two.transport.notes == ["begin a", "begin b", *expected]
        assert moved.digests == two.digests  # also where the readers take none


@pytest.mark.parametrize("digests", ["inline", "after"])
def test_streamed_in_host_memory(digests: str) -> None:
    with ExitStack() as owned:
        two = Two(Noting(digests=digests), owned, "streamed")
        two.engine.handle(Prepare(two.plan), SECONDS)
        assert isinstance(two.engine._filler, HostStreamed)
        assert two.engine._filler._staging.nbytes > 0
        two.adapter.loads_late = True  # so that nothing is read back
        moved = two.move(1)
        assert moved.verified == "received"
        received = moved.digests
        two.adapter.loads_late = False
        moved = two.move(2)
        assert (moved.verified, moved.digests) == ("installed", received)


def test_an_abort_while_a_connection_is_made_ends_the_preparation() -> None:
    with ExitStack() as owned:
        two = Two(Noting(), owned)
        two.transport.opening = two.engine.session.abort
        with pytest.raises(Aborted):
            two.engine.handle(Prepare(two.plan), SECONDS)
        assert two.transport.notes == ["close a"]
        assert two.engine._filler is None


class Devices:
    """Streams and events of a CUDA device that does its work as late as it may, except that of ``eager``."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = [FakeStream(self)]
        self.eager: list[FakeStream] = []
        self.current = self.streams[0]

    def queue(self, work: Callable[[], None]) -> None:
        self.current.queue(work)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield


class FakeStream:
    """A queue of work."""

    def __init__(self, devices: Devices) -> None:
        self.devices, self.work, self.done = devices, list[Callable[[], None]](), 0

    def queue(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        if self in self.devices.eager:
            self.run(len(self.work))

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event: FakeEvent) -> None:
        self.queue(event.synchronize)

    def wait_stream(self, other: FakeStream) -> None:
        end = len(other.work)
        self.queue(lambda: other.run(end))


class FakeEvent:
    """A point in the work of a stream."""

    stream: FakeStream
    end: int

    def record(self, stream: FakeStream) -> None:
        self.stream, self.end = stream, len(stream.work)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.stream.run(self.end)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices()

    def stream(device: torch.device) -> FakeStream:
        made.streams.append(FakeStream(made))
        return made.streams[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    return made


CUDA = torch.device("cuda", 0)
MANIFEST = Manifest([TensorSpec(f"t{index}", (4, 100), "float32") for index in range(6)])


class LaunchedReader(NotingReader):
    """Fills buckets by work on the current stream."""

    stream_ordered = True

    def __init__(self, devices: Devices, staging: Staging) -> None:
        self.devices, self.staging, self.notes = devices, staging, []

    def submit(self, group: int, deadline: Deadline, digests: npt.NDArray[np.uint64] | None = None) -> Completion:
        def fill() -> None:
            self.notes.append(f"fill {group}")
            for _, tensor in self.staging.tensors(group):
                tensor.fill_(group + 1)

        self.devices.queue(fill)
        event = FakeEvent()
        event.record(self.devices.current)
        return Launched(event)


class Launched:
    """The completion of a :class:`LaunchedReader`."""

    def __init__(self, event: FakeEvent) -> None:
        self.event = event

    def wait(self, deadline: Deadline) -> None:
        self.event.synchronize()


class Ring:
    """A pipeline over six buckets, whose loader takes what it finds on the device's stream."""

    def __init__(self, devices: Devices, buffers: int) -> None:
        self.devices, self.deadline = devices, Deadline(SECONDS)
        layout = staging_layout(MANIFEST, 1)
        self.staging = Staging(MANIFEST, layout, buffers=buffers)
        self.reader = LaunchedReader(devices, self.staging)
        self.loaded: list[float] = []
        self.digested: list[float] = []
        self.fails_at = -1
        self.pipeline = LaunchAhead(
            [self.reader],
            self.staging,
            [(row, row + 1) for row in range(6)],
            CUDA,
            self.digest,
            self.load,
            lambda: None,
            lambda reader, bucket, completion, deadline: completion.wait(deadline),
        )

    def value(self, bucket: int) -> float:
        return float(self.staging.tensors(bucket)[0][1].max())

    def digest(self, first: int, end: int) -> None:
        self.devices.queue(lambda: self.digested.append(self.value(first)))

    def load(self, bucket: int, deadline: Deadline) -> None:
        if bucket == self.fails_at:
            raise LoadError("on purpose")
        self.devices.queue(lambda: self.loaded.append(self.value(bucket)))


@pytest.mark.parametrize("eager", ["none", "loading", "filling"])
@pytest.mark.parametrize("buffers", [1, 2])
def test_no_bucket_is_loaded_before_it_is_full_or_filled_before_it_is_loaded(devices: Devices, buffers: int, eager: str) -> None:
    ring = Ring(devices, buffers)
    devices.eager = {"none": [], "loading": devices.streams[:1], "filling": devices.streams[1:]}[eager]
    for _ in range(2):
        ring.loaded, ring.digested, done = [], [], list[int]()
        ring.pipeline.run(done.append, ring.deadline)
        assert ring.loaded == ring.digested == [1, 2, 3, 4, 5, 6]
        assert done == [0, 1, 2, 3, 4, 5]


def test_after_an_error_no_launch_is_left(devices: Devices) -> None:
    ring = Ring(devices, 2)
    ring.fails_at = 2
    with pytest.raises(LoadError):
        ring.pipeline.run(lambda bucket: None, ring.deadline)
    assert ring.reader.notes == ["fill 0", "fill 1", "fill 2", "fill 3"]
    closed: list[bool] = []
    ring.pipeline.when_idle(lambda: closed.append(True))
    assert closed


def test_a_receiver_that_does_not_end_defers_what_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_ahead, "_GRACE", 0.05)
    entered, leave, aborted, closed = (threading.Event() for _ in range(4))

    def receive(bucket: int, deadline: Deadline) -> None:
        if bucket:
            entered.set()
            leave.wait(SECONDS)

    def load(bucket: int, deadline: Deadline) -> None:
        entered.wait(SECONDS)
        raise LoadError("on purpose")

    pipeline = ReceiveAhead(2, 2, receive, load, aborted.set)
    with pytest.raises(LoadError):
        pipeline.run(lambda bucket: None, Deadline(SECONDS))
    assert aborted.is_set()
    pipeline.when_idle(closed.set)
    assert not closed.is_set()
    leave.set()
    assert closed.wait(SECONDS)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python's garbage waits: what is freed in the test is referred to by nothing, not even by itself."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Memory:
    """Stands for the mapping that a frame of an error refers to."""


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("late", [False, True])
def test_a_pipeline_that_failed_keeps_nothing_of_the_error(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    monkeypatch.setattr(receive_ahead, "_GRACE", 0.05)
    entered, leave, freed = (threading.Event() for _ in range(3))

    def receive(bucket: int, deadline: Deadline) -> None:
        if not late or bucket:
            memory = Memory()
            weakref.finalize(memory, freed.set)
            entered.set()
            assert not late or leave.wait(SECONDS)
            raise PeerLost("on purpose")

    def load(bucket: int, deadline: Deadline) -> None:
        entered.wait(SECONDS)
        raise LoadError("on purpose")

    pipeline = ReceiveAhead(2, 2, receive, load, lambda: None)
    with pytest.raises(LoadError if late else PeerLost):
        pipeline.run(lambda bucket: None, Deadline(SECONDS))
    pipeline.when_idle(lambda: None)
    leave.set()
    assert freed.wait(5.0)


@pytest.mark.usefixtures("no_collection")
def test_a_window_that_failed_keeps_no_reader() -> None:
    here, key, freed = this_host(), b"k" * 32, threading.Event()
    with ExitStack() as owned:
        region = owned.enter_context(PublishedRegion(64, "d"))
        publisher = InProcess().publish(region, key, here)
        owned.callback(publisher.close)
        engine = EngineRole(Watched(torch.nn.Sequential(torch.nn.Linear(2, 2))), [InProcess()], here)
        owned.callback(engine.close)
        opening = OpenStream("k", (SourceAddress("trainer/0", "d", (publisher.offer,), key),), 64)
        receiver = WindowFiller(engine._fill_context, opening, takes_any=True)
        receiver.prepare(Deadline(SECONDS))
        weakref.finalize(receiver._sources[0][1], freed.set)
        with pytest.raises(StaleSource):
            receiver.move(MoveWindow(0, 0, WindowPlaced(stamp=3)), Deadline(SECONDS))
        receiver.close()
        del receiver
        assert freed.wait(5.0)


def test_the_seconds_of_receiving_are_those_of_one_run() -> None:
    pipeline = ReceiveAhead(1, 2, lambda bucket, deadline: time.sleep(0.05), lambda bucket, deadline: None, lambda: None)
    seconds = [pipeline.run(lambda bucket: None, Deadline(SECONDS))[0] for _ in range(20)]
    assert min(seconds) >= 0.05
    assert sum(seconds) < 20 * seconds[0] * 5, "a round reports its own seconds, not those of all rounds before it"


class FakeDigest:
    """Stands for the digests of rows on a device."""

    def __init__(self, manifest: Manifest, layout: object, device: torch.device) -> None:
        self.rows = len(layout)  # type: ignore[arg-type]

    def build(self, addresses: object) -> None: ...

    def launch(self, first: int, end: int, constants: DigestConstants) -> None: ...

    def taken(self) -> npt.NDArray[np.uint64]:
        return np.zeros(self.rows, np.uint64)


@pytest.mark.parametrize("shared_fate", [False, True])
def test_on_a_device_only_readers_that_share_fate_take_turns(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, shared_fate: bool
) -> None:
    monkeypatch.setattr("weightsync.engine.fill.direct.DeviceDigest", FakeDigest)
    with ExitStack() as owned:
        two = Two(Noting(writes=("host", "cuda"), digests="after", shared_fate=shared_fate), owned)
        assert two.engine._memory is not None
        found = dataclasses.replace(two.engine._memory, device=CUDA)  # which is in fact this host's memory
        monkeypatch.setattr(two.engine, "_look", lambda shards: found)
        two.engine.handle(Prepare(two.plan), SECONDS)
        assert isinstance(two.engine._filler, DeviceDirect)
        two.move(1)
        submits = [f"{what} {name}{' without digests' if what == 'submit' else ''}" for what in ("submit", "wait") for name in "ab"]
        turns = [f"{what} {name}" for name in "ab" for what in ("begin", "submit", "wait", "end")]
        if shared_fate:
            assert [note.removesuffix(" without digests") for note in two.transport.notes] == turns
        else:
            assert two.transport.notes == ["begin a", "begin b", *submits, "end a", "end b"]


@pytest.mark.parametrize(("writes", "kind"), [(("host", "cuda"), DeviceStreamed), (("host",), HostStreamed)])
def test_buckets_are_staged_on_the_device_if_every_source_reaches_it(writes: tuple[str, ...], kind: type[object]) -> None:
    with ExitStack() as owned:
        two = Two(Noting(writes=writes, digests="after"), owned, "streamed")
        context = dataclasses.replace(two.engine._fill_context, staging_device=CUDA)
        assert type(filler_for(context, two.plan, None)) is kind


@pytest.mark.parametrize("read_back", [True, False])
def test_streamed_on_a_device_by_readers_that_block(devices: Devices, monkeypatch: pytest.MonkeyPatch, read_back: bool) -> None:
    monkeypatch.setattr("weightsync.engine.fill.streamed.DeviceDigest", FakeDigest)
    monkeypatch.setattr(
        "weightsync.engine.fill.streamed.Staging", lambda *given, device, buffers, free: Staging(*given, buffers=buffers)
    )
    with ExitStack() as owned:
        two = Two(Noting(writes=("host", "cuda"), digests="after"), owned, "streamed")
        two.engine._fill_context = dataclasses.replace(two.engine._fill_context, staging_device=CUDA)
        two.adapter.loads_late = not read_back
        two.engine.handle(Prepare(two.plan), SECONDS)
        assert isinstance(two.engine._filler, DeviceStreamed)
        moved = two.move(1)
        assert moved.verified == ("installed" if read_back else "received")
        if read_back:
            two.adapter.loads_late = True  # as if the loader had replaced the parameters: nothing was digested on the way
            with pytest.raises(PlanMismatch, match="other parameters than it had"):
                two.move(2)
