"""Holds scheme ``collective`` to what only it does: one broadcast for readers that want the same, and what a member's death does.

Whole rounds: two trainer ranks that hold halves (processes), two replicas that are streamed to. Members: an owner and readers here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from weightsync.config import ServerSettings
from weightsync.deadline import Deadline
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import BroadcastBroken, StaleSource, WeightSyncError
from weightsync.server.server import BackgroundServer
from weightsync.transports.broadcast.collective import Collective
from weightsync.transports.broadcast.reader import BroadcastReader
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync_bench.peer import Peer, tensor_shapes
from weightsync_testing.copy_cases import Wanted, big
from weightsync_testing.owner_process import contents

KEY, DIGEST = b"k" * 32, "d" * 32
SIZE, TENSORS = 1 << 20, 6


class Net(torch.nn.Module):
    """The tensors of the bench's ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16) for _, shape in tensor_shapes(SIZE, TENSORS)
        )


def test_two_fsdp_ranks_stream_two_versions_to_two_replicas_bit_for_bit(tmp_path: Any) -> None:
    with ExitStack() as owned:
        server = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))
        config = {
            "coordinator": server.url, "token": server.token, "rendezvous": f"file://{tmp_path}/ranks", "transport": "collective",
            "role": "trainer", "size": SIZE, "tensors": TENSORS, "world": 2,
        }  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1"}
        trainers = [owned.enter_context(Peer("weightsync_bench.rank", config | {"rank": rank}, environment)) for rank in (0, 1)]
        for peer in trainers:
            peer.hear(50)
        nets = [Net(), Net()]
        for number, net in enumerate(nets):
            owned.enter_context(
                Engine(
                    ModuleAdapter(net), f"replica-{number}", server.url, token=server.token, transports=["collective"],
                    delivery="streamed", bucket_bytes=1 << 18,
                )
            )  # fmt: skip
        for version in (1, 2):
            for peer in trainers:
                peer.ask(do="change", seed=version)
            for peer in trainers:
                peer.tell(do="publish", number=version)
            result, _ = (peer.hear(50)["result"] for peer in trainers)
            assert [(one["version"], one["transports"], one["delivery"], one["verified"]) for one in result["replicas"]] == [
                (version, ["collective"], "streamed", "installed")
            ] * 2
            one, other = ([value.view(torch.int16) for value in net.parameters()] for net in nets)  # bits: some are NaN
            assert all(map(torch.equal, one, other))


@contextmanager
def owner(version: int, nbytes: int, **settings: Any) -> Iterator[tuple[PublishedRegion, Any]]:
    region = PublishedRegion(nbytes, DIGEST)
    with region.placing(version):
        region.payload[:] = contents(nbytes, version)
    made = Collective(buffer_bytes=2 << 20, **settings).publish(region, KEY, this_host())
    try:
        yield region, made
    finally:
        made.close()
        region.close()


def reader(made: Any, wanted: Wanted) -> BroadcastReader:
    source = Collective().open(made.offer, KEY, Deadline(10))
    assert isinstance(source, BroadcastReader)
    source.prepare(wanted.groups, DIGEST, Deadline(10))
    return source


def take(source: BroadcastReader, wanted: Wanted, version: int, failures: list[WeightSyncError], stop_after: int = 1 << 30) -> None:
    """A whole transfer, or ``stop_after`` groups of one."""
    try:
        source.begin(version, Deadline(20))
        for group in range(min(len(wanted.groups), stop_after)):
            source.read(group, Deadline(20))
        if stop_after >= len(wanted.groups):
            source.end(Deadline(20))
    except WeightSyncError as error:
        failures.append(error)


def together(*calls: Any) -> None:
    threads = [threading.Thread(target=call[0], args=call[1:]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def same(wanted: Wanted, version: int) -> bool:
    expected = wanted.expected(contents(wanted.nbytes, version))
    touched = expected != 0xA5
    return bool(np.array_equal(wanted.target[touched], expected[touched]))


def test_a_reader_that_dies_fails_the_others_soon_and_the_next_group_is_without_it() -> None:
    nbytes = 16 << 20
    alive, dying = big(nbytes, groups=12), big(nbytes, groups=12)
    failures: list[WeightSyncError] = []
    nothing: list[WeightSyncError] = []
    with owner(1, nbytes, gather_seconds=10.0) as (_, made):
        one, other = reader(made, alive), reader(made, dying)
        try:

            def die() -> None:
                take(other, dying, 1, nothing, stop_after=2)
                other.close()

            began = time.monotonic()
            together((take, one, alive, 1, failures), (die,))
            assert not nothing
            assert [type(error) for error in failures] == [BroadcastBroken]
            assert time.monotonic() - began < 10  # of a deadline of 20
            failures.clear()
            take(one, alive, 1, failures)  # at once, with nobody to wait for
            assert not failures
            assert same(alive, 1)
            assert one._group is not None
            assert one._group.world_size == 2
        finally:
            one.close()
            other.close()


def test_a_reader_that_comes_later_gets_a_group_of_its_own_and_then_all_are_in_one() -> None:
    nbytes = 4 << 20
    first, second = big(nbytes, groups=3), big(nbytes, groups=3)
    failures: list[WeightSyncError] = []
    with owner(1, nbytes, gather_seconds=0.2) as (region, made):
        one, other = reader(made, first), reader(made, second)
        try:
            take(one, first, 1, failures)  # goes on without the other, which is prepared but does not begin
            take(other, second, 1, failures)
            sizes = [source._group.world_size for source in (one, other) if source._group is not None]
            assert (failures, sizes) == ([], [2, 2])
            with region.placing(2):
                region.payload[:] = contents(nbytes, 2)
            made._gather_seconds = 10.0
            together((take, one, first, 2, failures), (take, other, second, 2, failures))
            assert not failures
            assert one._group is not None
            assert other._group is not None
            assert one._group.name == other._group.name
            kept = one._group, other._group
            together((take, other, second, 2, failures), (take, one, first, 2, failures))
            assert (failures, (one._group, other._group)) == ([], kept)  # nobody came or went
            assert same(first, 2)
            assert same(second, 2)
            take(one, first, 1, failures)
            assert [type(error) for error in failures] == [StaleSource]
        finally:
            one.close()
            other.close()
