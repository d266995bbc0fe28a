"""Contract tests that every transport passes.

Inherit them to test a transport of your own::

    # tests/test_my_transport.py
    from weightsync_testing.transport_contract import TransportContract, nothing_left  # the second is a fixture

    class TestMine(TransportContract):
        where = "my_package.transport:Mine"

The tests derive their expectations from the transport's :class:`~weightsync.protocol.messages.Traits`. A subclass overrides no
test. If a transport reads or writes several kinds of memory, define a subclass with ``source`` and ``target`` for each. Needs
pytest, and Linux for the faults.
"""

# ruff: noqa: D102 (the name of a test describes it)
from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.errors import (
    Aborted,
    AuthenticationError,
    DeadlineExceeded,
    LayoutError,
    PeerLost,
    ProtocolError,
    StaleSource,
    WeightSyncError,
)
from weightsync.protocol.messages import Memory, Offer, Traits
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.base import Reader, Transport
from weightsync.transports.hostinfo import this_host
from weightsync_testing.copy_cases import Wanted, big, keyed, odd_shapes, tiles_from
from weightsync_testing.fork_server import named
from weightsync_testing.owner_process import (
    FORK_SERVER,
    OwnerHere,
    OwnerProcess,
    Process,
    allocate_in,
    contents,
    make_transport,
)

KEY = b"the key of this contract's runs."
DIGEST = "0123456789abcdef0123456789abcdef"
SMALL = 1 << 16
BIG = 24 << 20  # more than socket buffers hold, so that faults happen during the transfer


def _left() -> dict[str, Any]:
    gc.collect()
    with os.scandir("/proc/self/fd") as entries:
        fds = sorted(int(entry.name) for entry in entries)
    fds = [fd for fd in fds if os.path.lexists(f"/proc/self/fd/{fd}")]
    maps = Path("/proc/self/maps").read_text()
    threads = sorted(thread.name for thread in threading.enumerate())
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return {
        "descriptors": fds,
        "threads": threads,
        "regions mapped": maps.count("memfd:weightsync"),
        "children": children.read_text() if children.exists() else "",
    }


@pytest.fixture
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test leaks no thread, process, descriptor, socket or shared memory."""
    FORK_SERVER.start()
    request.session.addfinalizer(FORK_SERVER.end)
    if warm_up := getattr(request.cls, "warm_up", ""):
        named(warm_up)()
    before = _left()
    yield
    after = _left()
    assert after == before, {what: (before[what], after[what]) for what in after if after[what] != before[what]}


@pytest.mark.usefixtures("nothing_left")
class TransportContract:
    """Suite of tests. Inherit it and set the class attributes."""

    where: ClassVar[str]
    arguments: ClassVar[dict[str, Any]] = {}
    source: ClassVar[Memory | None] = None
    """Memory that is published; by default the first that the transport reads."""
    target: ClassVar[Memory | None] = None
    """Memory that readers write to; by default the first that the transport writes."""
    buffers: ClassVar[dict[str, str]] = {"host": "", "cuda": "weightsync_testing.copy_cases:CudaBuffer"}
    """Buffer class for each target memory, ``"module:Class"``. A class of your own may simulate a device."""
    groups: ClassVar[int] = 1_000
    """Number of groups in the largest plan of these tests."""
    warm_up: ClassVar[str] = ""
    """``"module:function"`` to run in each process first. It makes the resources that a library keeps until the process ends."""

    # Helpers of the tests.

    @property
    def transport(self) -> Transport:
        return make_transport(self.where, self.arguments)

    @property
    def traits(self) -> Traits:
        return self.transport.traits

    @property
    def crosses_processes(self) -> bool:
        return self.traits.reach != "process"

    @property
    def buffer(self) -> str:
        return self.buffers[self.target or self.traits.writes[0]]

    def odd_shapes(self, nbytes: int, seed: int, tiles: int = 60, groups: int = 9) -> Wanted:
        return odd_shapes(nbytes, seed, tiles, groups, allocate_in(self.buffer))

    def big(self, nbytes: int, groups: int) -> Wanted:
        return big(nbytes, groups, allocate_in(self.buffer))

    def on_reading_thread(self) -> AbstractContextManager[object]:
        """Return what a test's own thread enters before it opens readers: a library may keep its device for each thread."""
        return nullcontext()

    @contextmanager
    def owner(self, nbytes: int = SMALL, digest: str = DIGEST, key: bytes = KEY) -> Iterator[OwnerHere | OwnerProcess]:
        """Publisher that must leak nothing."""
        owner: OwnerHere | OwnerProcess
        memory = self.source or self.traits.reads[0]
        if self.crosses_processes:
            owner = OwnerProcess(self.where, self.arguments, key, nbytes, digest, memory, self.warm_up)
        else:
            owner = OwnerHere(self.where, self.arguments, key, nbytes, digest, memory)
        try:
            yield owner
            left = owner.close()
            assert left == [], left
        finally:
            if isinstance(owner, OwnerProcess):
                owner.kill()
            else:
                owner.close()

    @contextmanager
    def process(self, nbytes: int = SMALL) -> Iterator[OwnerProcess]:
        """Publisher in a separate process, for faults."""
        if not self.crosses_processes:
            pytest.skip("publisher and reader share one process")
        with self.owner(nbytes) as owner:
            assert isinstance(owner, OwnerProcess)
            yield owner

    @contextmanager
    def reader(self, offer: Offer, key: bytes = KEY) -> Iterator[Reader]:
        source = self.transport.open(offer, key, Deadline(10))
        try:
            yield source
        finally:
            source.close()
            source.close()

    @contextmanager
    def prepared(self, owner: OwnerHere | OwnerProcess, wanted: Wanted) -> Iterator[Reader]:
        with self.reader(owner.offer) as source:
            source.prepare(wanted.groups, DIGEST, Deadline(10))
            yield source

    @contextmanager
    def published(self, wanted: Wanted, version: int = 1) -> Iterator[tuple[OwnerHere | OwnerProcess, Reader]]:
        """Yield a publisher that has placed ``version``, and a prepared reader."""
        with self.owner(wanted.nbytes) as owner:
            owner.place(version)
            with self.prepared(owner, wanted) as source:
                yield owner, source

    @contextmanager
    def begun_at(self, owner: OwnerHere | OwnerProcess, wanted: Wanted) -> Iterator[Reader]:
        """Yield a reader in the middle of a transfer, after its first group was read."""
        owner.place(1)
        with self.prepared(owner, wanted) as source:
            source.begin(1, Deadline(10))
            source.read(0, Deadline(10))
            yield source

    @contextmanager
    def begun(self, wanted: Wanted) -> Iterator[tuple[OwnerHere | OwnerProcess, Reader]]:
        """As :meth:`published`, in the middle of a transfer."""
        with self.owner(wanted.nbytes) as owner, self.begun_at(owner, wanted) as source:
            yield owner, source

    def transfer(self, source: Reader, wanted: Wanted, version: int, digests: UInt64 | None = None) -> None:
        """Transfer everything, and check that all bytes are correct and no others were written."""
        wanted.clear()
        source.begin(version, Deadline(20))
        for group in range(len(wanted.groups)):
            source.read(group, Deadline(20), digests)
        source.end(Deadline(20))
        wanted.fetch()
        different = np.flatnonzero(wanted.target != wanted.expected(contents(wanted.nbytes, version)))
        assert not len(different), f"{len(different)} bytes differ, the first at {different[0]}"

    # Correct transfers.

    @pytest.mark.parametrize("seed", range(4))
    def test_odd_shapes_arrive_byte_for_byte(self, seed: int) -> None:
        wanted = self.odd_shapes(SMALL, seed)
        with self.published(wanted) as (_, source):
            self.transfer(source, wanted, 1)

    @pytest.mark.parametrize("seed", range(4))
    def test_digests_are_those_of_the_bytes_in_place(self, seed: int) -> None:
        wanted = keyed(self.odd_shapes(SMALL << 4, seed + 100) if seed else self.big(3 << 19, groups=1), seed)
        digests = np.zeros(sum(map(len, wanted.groups)) + 1, np.uint64)
        with self.published(wanted) as (_, source):
            if self.traits.digests == "after":
                with pytest.raises(ProtocolError, match="takes no digests"):
                    self.transfer(source, wanted, 1, digests)
                return
            self.transfer(source, wanted, 1, digests)
            expected = wanted.digests()
            assert np.array_equal(digests[:-1], expected)
            self.transfer(source, wanted, 1, digests)  # adds to the previous digests
        assert np.array_equal(digests[:-1], expected + expected)
        assert digests[-1] == 0

    def test_digests_need_keys(self) -> None:
        wanted = self.odd_shapes(SMALL, 12)
        with self.published(wanted) as (_, source), pytest.raises((LayoutError, ProtocolError)):
            self.transfer(source, wanted, 1, np.zeros(100, np.uint64))

    def test_twenty_thousand_tiles_in_many_groups(self) -> None:
        wanted = self.odd_shapes(1 << 24, 7, tiles=20_000, groups=self.groups)
        with self.published(wanted) as (_, source):
            self.transfer(source, wanted, 1)

    def test_large_runs_and_wide_tiles(self) -> None:
        wanted = self.big(BIG, groups=5)
        with self.published(wanted, 3) as (_, source):
            self.transfer(source, wanted, 3)

    def test_every_version_brings_its_own_bytes(self) -> None:
        wanted = self.odd_shapes(SMALL, 11)
        with self.owner() as owner, ExitStack() as stack:
            owner.place(1)
            source = stack.enter_context(self.prepared(owner, wanted))
            for version in (1, 2, 5):
                owner.place(version)
                self.transfer(source, wanted, version)

    def test_nothing_wanted_is_a_transfer_too(self) -> None:
        empty = CopyTable.empty()
        with self.owner() as owner:
            owner.place(1)
            with self.reader(owner.offer) as source:
                for groups in ([], [empty, empty]):
                    source.prepare(groups, DIGEST, Deadline(5))
                    source.begin(1, Deadline(5))
                    for group in range(len(groups)):
                        source.read(group, Deadline(5))
                    source.end(Deadline(5))

    def test_an_empty_region_can_be_served(self) -> None:
        with self.owner(0) as owner:
            owner.place(1)
            with self.reader(owner.offer) as source:
                source.prepare([CopyTable.empty()], DIGEST, Deadline(5))
                source.begin(1, Deadline(5))
                source.read(0, Deadline(5))
                source.end(Deadline(5))

    def test_groups_are_submitted_before_any_is_waited_for(self) -> None:
        wanted = self.odd_shapes(SMALL, 13)
        with self.published(wanted) as (_, source):
            wanted.clear()
            source.begin(1, Deadline(10))
            running = [source.submit(group, Deadline(10)) for group in range(len(wanted.groups))]
            for completion in running:
                completion.wait(Deadline(10))
            source.end(Deadline(10))
            wanted.fetch()
            assert np.array_equal(wanted.target, wanted.expected(contents(wanted.nbytes, 1)))

    def test_readers_of_two_publishers_may_be_combined(self) -> None:
        first, second = self.odd_shapes(SMALL, 14), self.odd_shapes(SMALL, 15)
        with self.owner() as publisher, self.owner() as other, ExitStack() as stack:
            publisher.place(1)
            other.place(1)
            readers = [stack.enter_context(self.prepared(publisher, first)), stack.enter_context(self.prepared(other, second))]
            combined = self.transport.combine(readers)
            if combined is None:
                return
            for wanted in (first, second):
                wanted.clear()
            combined.begin(1, Deadline(10))
            for group in range(len(first.groups)):
                combined.submit(group, Deadline(10)).wait(Deadline(10))
            combined.end(Deadline(10))
            for wanted in (first, second):
                wanted.fetch()
                assert np.array_equal(wanted.target, wanted.expected(contents(wanted.nbytes, 1)))

    def test_prepared_anew_for_another_plan(self) -> None:
        first, second = self.odd_shapes(SMALL, 21), self.odd_shapes(SMALL, 22)
        with self.owner() as owner:
            owner.place(1)
            with self.prepared(owner, first) as source:
                self.transfer(source, first, 1)
                source.prepare(second.groups, DIGEST, Deadline(5))
                self.transfer(source, second, 1)

    def test_two_readers_at_once(self) -> None:
        failures: list[BaseException] = []

        def read(seed: int) -> None:
            try:
                wanted = self.odd_shapes(1 << 22, seed, tiles=500, groups=20)
                with self.on_reading_thread(), self.prepared(owner, wanted) as source:
                    for _ in range(3):
                        self.transfer(source, wanted, 1)
            except BaseException as error:  # noqa: BLE001 (checked by the test's thread)
                failures.append(error)

        with self.owner(1 << 22) as owner:
            owner.place(1)
            threads = [threading.Thread(target=read, args=(seed,)) for seed in (31, 32)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert not failures, failures

    # Requests that must be rejected.

    def test_wrong_version_is_stale(self) -> None:
        wanted = self.odd_shapes(SMALL, 41)
        with self.owner() as owner, self.prepared(owner, wanted) as source:
            with pytest.raises(StaleSource):
                source.begin(1, Deadline(5))  # nothing placed yet
            owner.place(2)
            with pytest.raises(StaleSource):
                source.begin(1, Deadline(5))
            self.transfer(source, wanted, 2)

    def test_wrong_layout_is_stale(self) -> None:
        wanted = self.odd_shapes(SMALL, 42)
        with self.owner() as owner, self.reader(owner.offer) as source:
            owner.place(1)
            with pytest.raises(StaleSource):
                source.prepare(wanted.groups, "f" * 32, Deadline(5))
            source.prepare(wanted.groups, DIGEST, Deadline(5))
            self.transfer(source, wanted, 1)

    @pytest.mark.parametrize(
        ("column", "value"),
        [("region", 1), ("region", -1), ("source", SMALL), ("source", -8), ("rows", 1 << 40), ("source_stride", 1 << 62)],
    )
    def test_a_tile_outside_the_region_is_refused(self, column: str, value: int) -> None:
        wanted = self.odd_shapes(SMALL, 43)
        good = {
            "region": 0,
            "source": 0,
            "source_stride": 64,
            "target": wanted.address,
            "target_stride": 64,
            "rows": 2,
            "row_bytes": 64,
        }
        bad = tiles_from(np.array([list({**good, column: value}.values())], np.int64))
        with self.owner() as owner, self.reader(owner.offer) as source:
            owner.place(1)
            with pytest.raises(ProtocolError):
                source.prepare([bad], DIGEST, Deadline(5))
            source.prepare(wanted.groups, DIGEST, Deadline(5))
            self.transfer(source, wanted, 1)

    def test_wrong_key_is_refused_and_other_readers_continue(self) -> None:
        wanted = self.odd_shapes(SMALL, 44)
        with self.published(wanted) as (owner, source):
            with pytest.raises(AuthenticationError):
                self.transport.open(owner.offer, b"another key, of the same length.", Deadline(5))
            self.transfer(source, wanted, 1)

    def test_calls_out_of_order_are_refused(self) -> None:
        wanted = self.odd_shapes(SMALL, 45)
        with self.owner() as owner, self.prepared(owner, wanted) as source:
            owner.place(1)
            with pytest.raises(ProtocolError):
                source.read(0, Deadline(5))
            with pytest.raises(ProtocolError):
                source.end(Deadline(5))
            source.begin(1, Deadline(5))
            with pytest.raises(ProtocolError):
                source.read(len(wanted.groups), Deadline(5))
            self.transfer(source, wanted, 1)

    def test_offers_reach_only_where_they_can(self) -> None:
        here = this_host()
        elsewhere = msgspec.structs.replace(here, name="elsewhere", memory="elsewhere")
        with self.owner() as owner:
            if self.crosses_processes:
                assert self.transport.reaches(owner.offer, here)
            if self.traits.reach == "host":
                assert not self.transport.reaches(owner.offer, elsewhere)
            assert owner.offer.scheme == self.transport.name
            assert owner.offer.traits == msgspec.structs.replace(self.traits, encrypted=owner.offer.traits.encrypted)

    # Changes during a transfer.

    def test_a_version_that_changes_on_the_way_is_stale(self) -> None:
        wanted = self.big(BIG, groups=12)
        with self.begun(wanted) as (owner, source):
            owner.place(2)
            with pytest.raises(StaleSource):
                self.rest(source, wanted)
            self.transfer(source, wanted, 2)

    def test_the_same_number_placed_again_on_the_way_is_stale(self) -> None:
        wanted = self.big(BIG, groups=12)
        with self.begun(wanted) as (owner, source):
            owner.place(1)
            with pytest.raises(StaleSource):
                self.rest(source, wanted)

    def read_groups(self, source: Reader, wanted: Wanted, deadline: Deadline) -> None:
        for group in range(1, len(wanted.groups)):
            source.read(group, deadline)

    def rest(self, source: Reader, wanted: Wanted) -> None:
        self.read_groups(source, wanted, Deadline(10))
        source.end(Deadline(10))

    # Processes that die, stop, abort or close.

    def test_a_killed_owner_is_noticed_at_once(self) -> None:
        wanted = self.big(BIG, groups=12)
        with self.process(BIG) as owner:
            with self.begun_at(owner, wanted) as source:
                owner.kill()
                started = time.monotonic()
                with pytest.raises(PeerLost):
                    self.rest(source, wanted)
                with pytest.raises(PeerLost):
                    source.begin(1, Deadline(10))
                assert time.monotonic() - started < 1
            with pytest.raises(PeerLost):
                self.transport.open(owner.offer, KEY, Deadline(5))

    def test_a_stopped_owner_costs_no_more_than_the_deadline(self) -> None:
        wanted = self.big(BIG, groups=12)
        with self.process(BIG) as owner, self.begun_at(owner, wanted) as source:
            owner.signal(signal.SIGSTOP)
            try:
                self.expect_deadline(lambda deadline: self.transport.open(owner.offer, KEY, deadline))
                if not self.traits.live_source:
                    self.expect_deadline(lambda deadline: self.read_groups(source, wanted, deadline))
                    self.expect_deadline(lambda deadline: source.begin(1, deadline))
            finally:
                owner.signal(signal.SIGCONT)
            self.transfer(source, wanted, 1)

    def expect_deadline(self, call: Callable[[Deadline], object]) -> None:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            call(Deadline(0.5))
        assert 0.4 < time.monotonic() - started < 1.5

    def test_a_passed_deadline_ends_a_read(self) -> None:
        wanted = self.odd_shapes(SMALL, 51)
        with self.published(wanted) as (_, source):
            source.begin(1, Deadline(5))
            late = Deadline(1e-6)
            late.at -= 1
            with pytest.raises(DeadlineExceeded):
                source.read(0, late)
            self.transfer(source, wanted, 1)

    def test_a_killed_reader_leaves_the_owner_serving(self) -> None:
        wanted = self.big(BIG, groups=12)
        with self.process(BIG) as owner:
            owner.place(1)
            reader = Process()
            setting = {"where": self.where, "arguments": self.arguments, "key": KEY.hex(), "nbytes": BIG, "layout_digest": DIGEST}
            setting["buffer"] = self.buffer
            reader.ask({"do": "read", "offer": owner.offer, **setting})
            reader.kill()
            with self.prepared(owner, wanted) as source:
                self.transfer(source, wanted, 1)

    def test_abort_from_another_thread(self) -> None:
        wanted = self.big(BIG, groups=12)
        with self.begun(wanted) as (_, source):
            aborting = threading.Thread(target=source.abort)
            aborting.start()
            aborting.join(5)
            started = time.monotonic()
            with pytest.raises(Aborted):
                self.rest(source, wanted)
            assert time.monotonic() - started < 1
            self.transfer(source, wanted, 1)

    def test_abort_wakes_a_blocked_read(self) -> None:
        if self.traits.live_source:
            pytest.skip("a reader that maps memory never waits for its publisher")
        wanted = self.big(BIG, groups=12)
        with self.process(BIG) as owner:
            owner.place(1)
            with self.prepared(owner, wanted) as source:
                source.begin(1, Deadline(10))
                owner.signal(signal.SIGSTOP)
                timer = threading.Timer(0.3, source.abort)
                started = time.monotonic()
                timer.start()
                try:
                    with pytest.raises(Aborted):
                        source.read(0, Deadline(10))
                        self.rest(source, wanted)
                    assert time.monotonic() - started < 1.5
                finally:
                    timer.join()
                    owner.signal(signal.SIGCONT)
                self.transfer(source, wanted, 1)

    def test_a_loader_that_raises_between_groups(self) -> None:
        wanted = self.big(BIG, groups=12)
        with self.published(wanted) as (_, source):
            source.begin(1, Deadline(10))
            source.read(0, Deadline(10))  # the loader raised, so the transfer is not continued
            self.transfer(source, wanted, 1)
            source.begin(1, Deadline(10))
            source.read(0, Deadline(10))
            source.prepare(wanted.groups, DIGEST, Deadline(10))
            self.transfer(source, wanted, 1)

    def test_a_reader_that_closes_in_the_middle(self) -> None:
        wanted = self.big(BIG, groups=12)
        with self.owner(BIG) as owner:
            with self.begun_at(owner, wanted) as source:
                pass
            with pytest.raises(WeightSyncError):
                source.read(1, Deadline(5))
            with self.prepared(owner, wanted) as source:
                self.transfer(source, wanted, 1)

    def test_an_owner_that_closes_in_the_middle(self) -> None:
        wanted = self.big(BIG, groups=12)
        with self.begun(wanted) as (owner, source):
            assert owner.close() == []
            with pytest.raises((PeerLost, StaleSource)):
                self.rest(source, wanted)
