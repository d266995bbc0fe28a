"""Windows of a stream over a broadcast: one group for all of them, and whoever leaves, stops or is late harms the others little.

Over gloo, and over the sockets that stand in for NCCL. The memory of a stream is a ring of windows; each is another request.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.errors import BroadcastBroken, DeadlineExceeded, PeerLost, WeightSyncError
from weightsync.tensors.copies import gather_tiles
from weightsync.transports.broadcast import collective as wire
from weightsync.transports.broadcast.collective import Collective
from weightsync.transports.broadcast.process_groups import ProcessGroup, init_custom_process_group
from weightsync.transports.broadcast.reader import BroadcastReader
from weightsync.transports.broadcast.sender import BroadcastJob, BroadcastPublisher, Packer, _Group
from weightsync.transports.broadcast.transport import Broadcast
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync_testing.copy_cases import tiles_from
from weightsync_testing.owner_process import contents
from weightsync_testing.transport_contract import nothing_left

__all__ = ["nothing_left"]

KEY, LAYOUT = b"k" * 32, "d" * 32
WINDOW, SLOTS = 6 << 20, 3
SECONDS = 20.0


def collective(**settings: Any) -> Broadcast:
    return Collective(buffer_bytes=2 << 20, **settings)


def nccl(**settings: Any) -> Broadcast:
    from tests.contract.transports.nccl_on_cpu import NcclOnCpu

    return NcclOnCpu(buffer_bytes=2 << 20, **settings)


WIRES = [
    pytest.param(collective, id="collective"),
    pytest.param(nccl, id="nccl", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real one")),
]


class Member:
    """A reader of the stream's windows, in a thread of its own."""

    def __init__(self, stream: StreamOfWindows, seconds: float = SECONDS) -> None:
        opened = stream.transport.open(stream.publisher.offer, KEY, Deadline(10))
        assert isinstance(opened, BroadcastReader)
        self.reader, self.seconds = opened, seconds
        self.target = np.zeros(WINDOW, np.uint8)
        self.attempts: list[WeightSyncError | None] = []
        self._stream = stream

    def prepare(self, window: int) -> Deadline:
        deadline = Deadline(self.seconds)
        row = [0, window % SLOTS * WINDOW, 0, int(self.target.ctypes.data), 0, 1, WINDOW - window]
        self.reader.prepare([tiles_from(np.array([row], np.int64))], LAYOUT, deadline)
        return deadline

    def take(self, window: int, most: int = 3) -> None:
        """Read a window, again if others broke it. :attr:`attempts` says how each attempt ended."""
        self.attempts.clear()
        self.target[:] = 0
        for _ in range(most):
            try:
                deadline = self.prepare(window)
                self.reader.begin(self._stream.version, deadline)
                self.reader.read(0, deadline)
                self.reader.end(deadline)
            except WeightSyncError as error:
                self.attempts.append(error.with_traceback(None))
                if not isinstance(error, BroadcastBroken):
                    return
            else:
                self.attempts.append(None)
                return

    def has(self, window: int) -> bool:
        first, size = window % SLOTS * WINDOW, WINDOW - window
        return self.attempts[-1] is None and bool(
            np.array_equal(self.target[:size], self._stream.region.payload[first : first + size])
        )

    @property
    def group(self) -> str:
        group = self.reader._group
        return "" if group is None else group.name

    @property
    def size(self) -> int:
        group = self.reader._group
        return 0 if group is None else group.world_size


class StreamOfWindows:
    """A ring of windows that is published, and its readers."""

    def __init__(self, make: Callable[..., Broadcast], owned: ExitStack, gather_seconds: float = 5.0) -> None:
        self.transport, self._owned, self.version = make(gather_seconds=gather_seconds), owned, 1
        self.region = PublishedRegion(SLOTS * WINDOW, LAYOUT, windows=True)
        owned.callback(self.region.close)
        self.place(1)
        published = self.transport.publish(self.region, KEY, this_host())
        assert isinstance(published, BroadcastPublisher)
        self.publisher = published
        owned.callback(published.close)

    def place(self, version: int) -> None:
        self.version = version
        with self.region.placing(version):
            self.region.payload[:] = contents(SLOTS * WINDOW, version)

    def members(self, count: int, seconds: float = SECONDS) -> list[Member]:
        made = [Member(self, seconds) for _ in range(count)]
        for member in made:
            self._owned.callback(member.reader.close)
        return made


def together(members: list[Member], window: int, *others: Callable[[], None]) -> float:
    """Let all members take a window at once. Returns the seconds that it took."""
    calls = [*(lambda member=member: member.take(window) for member in members), *others]
    threads = [threading.Thread(target=call) for call in calls]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    return time.monotonic() - started


@pytest.fixture
def owned(nothing_left: None) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    gc.collect()


class TestWindows:
    warm_up = "tests.contract.transports.warm_up:open_a_store"

    @pytest.mark.parametrize("make", WIRES)
    def test_windows_of_all_publications_go_through_one_group_and_each_goes_once(
        self, make: Callable[..., Broadcast], owned: ExitStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: list[int] = []
        send = BroadcastPublisher._send

        def counting(publisher: BroadcastPublisher, transfer: Any, members: Any) -> None:
            sent.append(len(members))
            send(publisher, transfer, members)

        monkeypatch.setattr(BroadcastPublisher, "_send", counting)
        stream = StreamOfWindows(make, owned)
        members = stream.members(3)
        groups = set()
        for version in (1, 2):
            stream.place(version)
            for window in range(5):
                together(members, window)
                assert all(member.has(window) for member in members), [member.attempts for member in members]
                groups |= {member.group for member in members}
        assert len(groups) == 1
        assert sent == [3] * 10

    @pytest.mark.parametrize("make", WIRES)
    def test_a_member_that_leaves_in_a_window_costs_the_others_one_more_attempt(
        self, make: Callable[..., Broadcast], owned: ExitStack
    ) -> None:
        stream = StreamOfWindows(make, owned)
        leaving, *staying = stream.members(3)
        together([leaving, *staying], 0)
        connections = [member.reader._channel for member in staying]

        def leave() -> None:
            deadline = leaving.prepare(1)
            leaving.reader.begin(stream.version, deadline)
            leaving.reader.close()

        assert together(staying, 1, leave) < SECONDS / 4
        assert all(member.has(1) for member in staying), [member.attempts for member in staying]
        assert {len(member.attempts) for member in staying} <= {1, 2}
        together(staying, 2)
        assert all(member.has(2) and member.size == 3 for member in staying)
        assert staying[0].group == staying[1].group
        assert [member.reader._channel for member in staying] == connections  # a group broke, no connection did

    @pytest.mark.parametrize("make", WIRES)
    def test_a_member_that_stops_in_a_window_neither_fails_the_others_nor_holds_them_up_again(
        self, make: Callable[..., Broadcast], owned: ExitStack
    ) -> None:
        stream = StreamOfWindows(make, owned)
        stopping, *going = stream.members(3, seconds=4.0)
        together([stopping, *going], 0)
        go_on = threading.Event()

        def stop() -> None:
            stopping.reader.begin(stream.version, stopping.prepare(1))
            go_on.wait(30)

        thread = threading.Thread(target=stop)
        thread.start()
        try:
            assert together(going, 1) < 3.5
            assert all(member.has(1) for member in going), [member.attempts for member in going]
            assert together(going, 2) < 1.5  # it is still connected
            assert all(member.has(2) for member in going), [member.attempts for member in going]
        finally:
            go_on.set()
            thread.join(30)
        stream.place(2)
        stopping.reader.abort()
        stopping.prepare(0)  # it is connected again
        together([stopping, *going], 0)
        assert all(member.has(0) and member.size == 4 for member in (stopping, *going))

    @pytest.mark.parametrize("make", WIRES)
    def test_a_member_that_does_not_ask_is_waited_for_once(self, make: Callable[..., Broadcast], owned: ExitStack) -> None:
        stream = StreamOfWindows(make, owned, gather_seconds=0.6)
        silent, *asking = stream.members(3)
        together([silent, *asking], 0)
        assert together(asking, 1) >= 0.6
        assert together(asking, 2) < 0.6
        assert all(member.has(2) and member.size == 3 for member in asking)
        silent.take(2)  # the others have it: it waits for nobody
        assert silent.has(2)
        together([silent, *asking], 3)
        assert all(member.has(3) and member.size == 4 for member in (silent, *asking))

    def test_a_group_whose_readers_come_one_by_one_ends_at_its_deadline(self) -> None:
        """A store's client waits for each member anew."""
        limit = 1.0
        publisher = Collective().publish(PublishedRegion(WINDOW, LAYOUT, windows=True), KEY, this_host())
        assert isinstance(publisher, BroadcastPublisher)
        silent: Any = object()
        group = _Group(publisher._wire, publisher.bound, (silent, silent), Deadline(limit))
        began = time.monotonic()

        def come_late() -> None:
            time.sleep(0.7 * limit)
            with suppress(WeightSyncError):
                init_custom_process_group("gloo", 1, 3, group.name, Deadline(2.0), address="127.0.0.1", port=group.port)

        late = threading.Thread(target=come_late)
        late.start()
        with pytest.raises(DeadlineExceeded, match="did not join its group within 1 s"):
            group.join(Deadline(limit))
        assert time.monotonic() - began < 1.3 * limit
        late.join(10)
        group.close()
        publisher.close()

    @pytest.mark.parametrize("make", WIRES)
    def test_a_publisher_that_goes_away_is_not_asked_again(self, make: Callable[..., Broadcast], owned: ExitStack) -> None:
        stream = StreamOfWindows(make, owned)
        members = stream.members(2)
        together(members, 0)
        begun = threading.Barrier(3)

        def wait(member: Member) -> None:
            deadline = member.prepare(1)
            member.reader.begin(stream.version, deadline)
            begun.wait(10)
            try:
                member.reader.read(0, deadline)
                member.reader.end(deadline)
            except WeightSyncError as error:
                member.attempts.append(error.with_traceback(None))

        def close() -> None:
            begun.wait(10)
            stream.publisher.close()

        def first() -> None:
            wait(members[0])

        def second() -> None:
            wait(members[1])

        assert together([], 1, first, second, close) < SECONDS / 4
        for member in members:
            assert type(member.attempts[-1]) is PeerLost or member.attempts[-1] is None, member.attempts

    def test_a_window_whose_packing_takes_too_long_goes_to_each_reader_alone(
        self, owned: ExitStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = StreamOfWindows(collective, owned)
        members = stream.members(2, seconds=2.0)
        packed = threading.Event()

        def slowly(*arguments: Any) -> None:
            if not packed.is_set():
                packed.set()
                time.sleep(1.2)  # more than half of the readers' time
            gather_tiles(*arguments)

        monkeypatch.setattr(wire, "gather_tiles", slowly)
        together(members, 0)
        assert all(member.has(0) and member.size == 2 for member in members), [member.attempts for member in members]
        assert {len(member.attempts) for member in members} == {2}
        assert "packing a bucket did not finish within" in str(members[0].attempts[0])

    @pytest.mark.parametrize("make", WIRES)
    def test_a_window_that_breaks_twice_goes_to_each_reader_alone(
        self, make: Callable[..., Broadcast], owned: ExitStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Readers that reach the publisher and not each other, say."""
        stream = StreamOfWindows(make, owned)
        members = stream.members(3)
        kind = type(stream.publisher._wire.packer())
        send = kind.send

        def broken(packer: Packer, group: ProcessGroup, job: BroadcastJob, deadline: Deadline) -> None:
            if group.world_size > 2:
                send(packer, group, job._replace(frames=job.frames[:1]), deadline)
                raise PeerLost("told to break")
            send(packer, group, job, deadline)

        monkeypatch.setattr(kind, "send", broken)
        together(members, 0)
        assert all(member.has(0) and member.size == 2 for member in members), [member.attempts for member in members]
        assert {len(member.attempts) for member in members} == {3}
        together(members, 1)
        assert {len(member.attempts) for member in members} == {1}
        monkeypatch.undo()
        stream.place(2)
        together(members, 0)
        assert all(member.has(0) and member.size == 4 for member in members)
