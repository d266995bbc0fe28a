"""Holds the front of a disaggregated update to its contract, late answers, labels, partial updates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch

from weightsync.config import update_networks
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, DeadlineExceeded, ManifestMismatch, PeerLost, VerificationError, WeightSyncError
from weightsync.model import Manifest, TensorSpec, fold
from weightsync.protocol.messages import Answer, Body, Call, Commit, Done, Failure, Pause, Quarantine, Resume, decode, encode
from weightsync.protocol.update_messages import Describe, Described, Digested, JoinGroup, LeaveGroup, Receive, Verify
from weightsync.transports.broadcast.process_groups import ProcessGroup
from weightsync_disaggregated import requests
from weightsync_disaggregated.rank import DisaggregatedRank
from weightsync_disaggregated.ranks import LocalRanks
from weightsync_disaggregated.weight_updates import Settings, WeightUpdates, _GroupState

NAMES = ("a", "b", "c")
MANIFEST = Manifest([TensorSpec(name, (4,), "float32") for name in NAMES])
ALL = requests.Tensors(names=list(NAMES), dtypes=["float32"] * 3, shapes=[[4]] * 3)


class Digesting:
    """One rank whose weights are their digests: ``sent`` says what the next bucket brings."""

    count = 1

    def __init__(self, *, installed: bool = True) -> None:
        self.calls: list[Call] = []
        self.sent: dict[str, int] = {}
        self.held = dict.fromkeys(NAMES, 0)
        self.received: set[str] = set()
        self.installed = installed
        self.before: Callable[[Body], Awaitable[Body | Failure | None]] | None = None

    async def send(self, message: bytes, timeout: float) -> Sequence[bytes | None]:
        call = decode(message)
        assert isinstance(call, Call)
        self.calls.append(call)
        answer = None if self.before is None else await self.before(call.body)
        answer = self._obey(call.body) if answer is None else answer
        return [encode(answer if isinstance(answer, Failure) else Answer(0, answer))]

    def _obey(self, order: Body) -> Body:
        match order:
            case Describe():
                return Described(MANIFEST.tensors, ("gloo",))
            case Pause():
                self.received.clear()
            case Receive():
                names = [NAMES[index] for index in order.tensors]
                self.held |= {name: self.sent[name] for name in names}
                self.received.update(names)
            case Verify():
                known = set(NAMES) if self.installed else self.received
                values = [self.held[name] if name in known else 0 for name in NAMES]
                return Digested(np.array(values, "<u8").tobytes(), self.installed)
        return Done()


def folded(*values: int) -> str:
    return fold(np.array(values, np.uint64))


def bucket(group: str = "g", *names: str, finished: bool = False) -> requests.UpdateRequest:
    chosen = list(names or NAMES)
    return requests.UpdateRequest(
        names=chosen, dtypes=["float32"] * len(chosen), shapes=[[4]] * len(chosen), group_name=group, finished=finished
    )  # fmt: skip


async def front(ranks: Digesting, *groups: str, **settings: float) -> WeightUpdates:
    updates = WeightUpdates(ranks, Settings(**settings))  # type: ignore[arg-type]
    for name in groups or ("g",):
        await updates.init_group(
            requests.InitGroupRequest(
                master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name=name, backend="gloo"
            )
        )
    return updates


async def complete(updates: WeightUpdates, ranks: Digesting, *values: int, digest: bool = True) -> str:
    ranks.sent = dict(zip(NAMES, values, strict=True))
    await updates.begin(requests.BeginRequest())
    await updates.update(bucket())
    return await updates.commit(requests.CommitRequest(digest=folded(*values) if digest else None))


class Hanging:
    """A group whose sender never sends."""

    backend = "gloo"

    def __init__(self) -> None:
        self.closed = False
        self.entered, self.over = threading.Event(), threading.Event()

    def broadcast(self, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
        self.entered.set()
        self.over.wait(deadline.remaining("a broadcast"))
        raise PeerLost("the group was destroyed")

    def close(self) -> None:
        self.closed = True
        self.over.set()


class Late:
    """Holds the first bucket through ``group`` until it is told how it ends."""

    def __init__(self, group: str) -> None:
        self.group, self.arrived = group, asyncio.Event()
        self.end: asyncio.Future[Body | Failure] = asyncio.get_running_loop().create_future()

    async def __call__(self, order: Body) -> Body | Failure | None:
        if isinstance(order, Receive) and order.group == self.group and not self.arrived.is_set():
            self.arrived.set()
            return await self.end
        return None


@pytest.mark.parametrize("answer", [Done(), Failure(0, "PeerLost", "destroyed")], ids=["received", "failed"])
async def test_the_answer_to_a_bucket_of_an_aborted_update_says_so_and_changes_nothing(answer: Body | Failure) -> None:
    ranks = Digesting()
    updates = await front(ranks, "old", "g")
    ranks.before = late = Late("old")
    await updates.begin(requests.BeginRequest())
    first = asyncio.create_task(updates.update(bucket("old")))
    await late.arrived.wait()
    await updates.destroy(requests.DestroyRequest(group_name="old"))
    await updates.abort()
    await complete(updates, ranks, 1, 2, 3)
    late.end.set_result(answer)
    with pytest.raises(WeightSyncError, match=r"the update ended|destroyed"):
        await first
    state = await updates.state()
    assert (state.state, state.error, state.groups) == ("serving", None, ("g",))


async def test_every_order_of_an_update_carries_its_number_and_no_two_updates_share_one() -> None:
    ranks = Digesting()
    updates = await front(ranks)
    numbers = []
    for round_ in range(3):
        await complete(updates, ranks, 1, 2, round_ + 3)
        own = {call.update for call in ranks.calls} - {0}
        assert len(own) == 1
        numbers.append(own.pop())
        ranks.calls.clear()
    assert len(set(numbers)) == 3


async def test_a_bucket_through_a_destroyed_group_does_not_free_a_later_group_of_that_name() -> None:
    ranks = Digesting()
    updates = await front(ranks, "g")
    ranks.before = late = Late("g")
    await updates.begin(requests.BeginRequest())
    first = asyncio.create_task(updates.update(bucket()))
    await late.arrived.wait()
    await updates.destroy(requests.DestroyRequest(group_name="g"))
    await updates.init_group(
        requests.InitGroupRequest(
            master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo"
        )
    )
    late.end.set_result(Failure(0, "PeerLost", "gone"))
    with pytest.raises(WeightSyncError, match="gone"):
        await first
    assert (await updates.state()).groups == ("g",)  # the new one is not left on account of the old


async def test_an_error_is_that_of_the_join_or_bucket_and_not_of_leaving_the_group_after_it() -> None:
    async def fails(order: Body) -> Body | Failure | None:
        match order:
            case LeaveGroup():
                return Failure(0, "DeadlineExceeded", "leaving hung")
            case JoinGroup(name="other"):
                return Failure(0, "PeerLost", "nobody came")
            case Receive():
                return Failure(0, "PeerLost", "the sender died")
        return None

    ranks = Digesting()
    updates = await front(ranks)
    ranks.before = fails
    with pytest.raises(WeightSyncError, match="nobody came"):
        await updates.init_group(
            requests.InitGroupRequest(
                master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="other", backend="gloo"
            )
        )
    await updates.begin(requests.BeginRequest())
    with pytest.raises(WeightSyncError, match="the sender died"):
        await updates.update(bucket())
    assert (await updates.state()).groups == ()


async def test_the_steps_of_a_commit_share_what_is_left_of_the_update() -> None:
    ranks = Digesting()
    updates = await front(ranks)
    ranks.sent = dict.fromkeys(NAMES, 1)

    async def slow(order: Body) -> Body | Failure | None:
        if isinstance(order, Verify | Commit):
            await asyncio.sleep(0.2)
        return None

    ranks.before = slow
    await updates.begin(requests.BeginRequest(timeout=3.0))
    await updates.update(bucket())
    await updates.commit(requests.CommitRequest())
    limits = [call.timeout for call in ranks.calls if isinstance(call.body, Verify | Commit | Resume)]
    assert limits[0] >= limits[1] + 0.2 >= limits[2] + 0.4
    await updates.begin(requests.BeginRequest(timeout=0.3))
    await updates.update(bucket())
    with pytest.raises(DeadlineExceeded, match="the update"):
        await updates.commit(requests.CommitRequest())
    assert not isinstance(ranks.calls[-2].body, Resume)
    assert isinstance(ranks.calls[-1].body, Quarantine)


async def test_a_group_can_be_destroyed_while_buckets_hang_in_all_of_them() -> None:
    adapter = ModuleAdapter(torch.nn.Linear(2, 2, bias=False))
    rank = DisaggregatedRank(adapter)
    local = LocalRanks(rank)
    updates = WeightUpdates(local, Settings(leave_timeout=1.0, bucket_timeout=20.0))
    names = [f"g{number}" for number in range(updates.settings.max_groups)]
    groups = {name: Hanging() for name in names}
    rank._groups.update({name: cast(ProcessGroup, group) for name, group in groups.items()})
    for name in names:
        updates._groups[name] = state = _GroupState()
        state.state = "ready"
    await updates.begin(requests.BeginRequest())
    sent = [
        asyncio.create_task(
            updates.update(requests.UpdateRequest(names=["weight"], dtypes=["float32"], shapes=[[2, 2]], group_name=name))
        )
        for name in names
    ]
    try:
        async with asyncio.timeout(10):
            for group in groups.values():
                await asyncio.to_thread(group.entered.wait, 10)
            for name in names:
                await updates.destroy(requests.DestroyRequest(group_name=name))
            answers = await asyncio.gather(*sent, return_exceptions=True)
        assert all(isinstance(answer, WeightSyncError) for answer in answers)
    finally:
        for group in groups.values():
            group.close()
        local.close()


async def test_the_label_of_a_partial_update_folds_all_tensors() -> None:
    ranks = Digesting()
    updates = await front(ranks)
    await complete(updates, ranks, 1, 2, 3)
    ranks.sent = {"b": 20}
    await updates.begin(requests.BeginRequest(partial=True))
    await updates.update(bucket("g", "b"))
    message = await updates.commit(requests.CommitRequest(digest=folded(20)))
    assert (await updates.state()).digest == folded(1, 20, 3)
    assert "with 1 tensors, verified as installed; the other 2 are those of disaggregated@0, read again and unchanged" in message


async def test_a_partial_update_claims_nothing_for_tensors_that_were_never_verified() -> None:
    ranks = Digesting(installed=False)
    updates = await front(ranks)
    await complete(updates, ranks, 1, 2, 3, digest=False)
    for value, rest in ((20, "not read again, 2 of them never verified"), (21, "not read again, 2 of them never verified")):
        ranks.sent = {"b": value}
        await updates.begin(requests.BeginRequest(partial=True))
        await updates.update(bucket("g", "b"))
        message = await updates.commit(requests.CommitRequest(digest=folded(value)))
        assert message.endswith(rest), message
        assert (await updates.state()).digest == folded(1, value, 3)


async def test_a_tensor_that_was_not_sent_and_changed_fails_a_partial_update() -> None:
    ranks = Digesting()
    updates = await front(ranks)
    await complete(updates, ranks, 1, 2, 3)
    ranks.sent = {"b": 20}
    await updates.begin(requests.BeginRequest(partial=True))
    await updates.update(bucket("g", "b"))
    ranks.held["c"] = 99
    with pytest.raises(VerificationError, match="1 tensors changed that were not sent: c"):
        await updates.commit(requests.CommitRequest(digest=folded(20)))
    assert (await updates.state()).state == "dirty"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"names": ["a", "b", "other"]}, ManifestMismatch, "other"),
        ({"shapes": [[4], [4], [5]]}, ManifestMismatch, "shape of c"),
        ({"dtypes": ["float32", "float32", "float16"]}, ManifestMismatch, "dtype of c"),
        ({"dtypes": ["float32"] * 2}, ConfigurationError, "as many of each"),
        ({"names": ["a", "b", "b"]}, ConfigurationError, "twice"),
        ({"names": ["a", "b"], "dtypes": ["float32"] * 2, "shapes": [[4]] * 2}, ManifestMismatch, "not there to be sent: c"),
        ({"names": [], "dtypes": [], "shapes": []}, ManifestMismatch, "3 of the engine's 3"),
    ],
)
async def test_a_begin_that_says_what_comes_is_refused_before_anything_is_paused(
    change: dict[str, list[object]], error: type[Exception], words: str
) -> None:
    ranks = Digesting()
    updates = await front(ranks)
    fields = {"names": ALL.names, "dtypes": ALL.dtypes, "shapes": ALL.shapes} | change
    tensors = requests.Tensors(**fields)  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        await updates.begin(requests.BeginRequest(tensors=tensors))
    with pytest.raises(error, match=words):
        await updates.check(requests.CheckRequest(tensors=tensors))
    assert not any(isinstance(call.body, Pause) for call in ranks.calls)
    assert (await updates.state()).state == "serving"


async def test_a_check_changes_nothing_and_a_begin_of_what_fits_pauses() -> None:
    ranks = Digesting()
    updates = await front(ranks)
    assert "fits" in await updates.check(requests.CheckRequest(tensors=ALL, weight_version="7"))
    assert not any(isinstance(call.body, Pause) for call in ranks.calls)
    with pytest.raises(ConfigurationError, match="not a version"):
        await updates.check(requests.CheckRequest(tensors=ALL, weight_version="newest"))
    await updates.begin(requests.BeginRequest(tensors=ALL))
    assert (await updates.state()).state == "updating"


@pytest.mark.parametrize("address", ["192.0.3.1", "localhost", "::1", "192.0.2.1.example.org", "0300.0.2.1"])
async def test_a_rendezvous_outside_the_networks_is_refused_before_anybody_connects(address: str) -> None:
    ranks = Digesting()
    updates = WeightUpdates(ranks, Settings(networks=("192.0.2.0/24", "2001:db8::/32")))
    wish = requests.InitGroupRequest(master_address=address, master_port=1, rank_offset=1, world_size=2, backend="gloo")
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.0/24, 2001:db8::/32"):
        await updates.init_group(wish)
    assert not any(isinstance(call.body, JoinGroup) for call in ranks.calls)
    for good in ("192.0.2.77", "2001:db8::5"):
        fields = {name: getattr(wish, name) for name in wish.__struct_fields__} | {"master_address": good, "group_name": good}
        await updates.init_group(requests.InitGroupRequest(**fields))


def test_a_network_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a network"):
        Settings(networks=("192.0.2.0/24", "nowhere"))


def test_networks_of_the_environment() -> None:
    assert update_networks({}) == ()
    assert update_networks({"WEIGHTSYNC_UPDATE_NETWORKS": "192.0.2.0/24, 2001:db8::/32,"}) == ("192.0.2.0/24", "2001:db8::/32")
