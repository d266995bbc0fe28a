"""Holds the routes of a disaggregated update to their contract, over real HTTP and gloo, faults first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tests.integration.external.disaggregated_server import DRAFT, SHAPES, checkpoint
from tests.integration.external.disaggregated_support import Sender, Server, serving
from tests.integration.fork_server import FORK_SERVER

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, PeerLost
from weightsync.model import fold
from weightsync.tensors.digest import digest_box
from weightsync.tensors.shards import manifest_of
from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group

pytestmark = pytest.mark.usefixtures("no_leaks")


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{digest_box(t, t.shape, [0] * t.dim()):016x}" for name, t in tensors.items()}


def _fold(tensors: dict[str, torch.Tensor]) -> str:
    digests = _digests(tensors)
    return fold(np.array([int(digests[spec.name], 16) for spec in manifest_of(tensors)], np.uint64))


@pytest.fixture(scope="module", autouse=True)
def gloo() -> None:
    """Gloo keeps a pipe from its first group on, for the life of the process; the fork server a socket."""
    FORK_SERVER.start()
    rendezvous = StoreRendezvous("127.0.0.1", 1, Deadline(10))
    init_custom_process_group("gloo", 0, 1, "first", Deadline(10), rendezvous=rendezvous).close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """Two ranks with a draft model."""
    with serving(ranks=2, draft=True) as server:
        yield server


@pytest.fixture
def sender(pair: Server) -> Iterator[Sender]:
    made = Sender(pair, "weights", ranks=2)
    yield made
    made.close()
    for rank in range(2):
        pair.fault(rank)
    if "weights" in pair.state()["groups"]:
        assert pair.post("/destroy_weights_update_group", group_name="weights")[0] == 200
    pair.post("/abort_weight_update")
    pair.calls()


def _split(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    names = list(tensors)
    return [{name: tensors[name] for name in part} for part in (names[:3], names[3:])]


def test_begun_update_is_verified_as_installed_and_seen_by_both_models_of_all_ranks(
    pair: Server, sender: Sender, seed: int
) -> None:
    for round_ in range(2):  # a second time with other values, or stale bytes stay invisible
        tensors = checkpoint(seed + round_, draft=True)
        manifest = manifest_of(tensors)
        assert (
            pair.post("/begin_weight_update", manifest=manifest.fingerprint, mode="keep", weight_version=f"rl@{round_}")[0] == 200
        )
        assert pair.state()["state"] == "updating"
        assert pair.state()["weight_version"] is None
        for bucket in _split(tensors):
            assert sender.send(bucket) == (200, f"received and loaded {len(bucket)} tensors")
        status, message = pair.post("/commit_weight_update", digest=_fold(tensors), digests=_digests(tensors))
        assert (status, message) == (200, f"version rl@{round_} with 8 tensors, verified as installed")
        state = pair.state()
        assert (state["state"], state["weight_version"], state["digest"]) == ("serving", f"rl@{round_}", _fold(tensors))
        assert [pair.holds(tensors, rank) for rank in range(2)] == [[], []]
        calls = pair.calls()
        assert calls.count("pause keep") == calls.count("flush") == calls.count("resume") == 4
        assert calls.count("reset graphs") == calls.count("load mtp.head.weight") == 2
        last_load = max(i for i, call in enumerate(calls) if call.startswith("load"))
        firsts = [calls.index(call) for call in (f"finish rl@{round_}", "reset graphs", "flush", "resume")]
        assert firsts == sorted(firsts)
        assert last_load < firsts[0]


def test_lmdeploys_update_without_begin_ends_with_finished(pair: Server, sender: Sender, seed: int) -> None:
    tensors = checkpoint(seed, draft=True)
    first, rest = _split(tensors)
    assert sender.send(first)[0] == 200
    assert pair.state()["state"] == "updating"
    status, message = sender.send(rest, finished=True, digests=_digests(tensors))
    assert status == 200
    assert "verified as installed" in message
    assert pair.holds(tensors, 1) == []
    tensors = checkpoint(seed + 1, draft=True)
    assert sender.send(tensors)[0] == 200
    assert (
        pair.post("/update_weights_from_distributed", names=[], dtypes=[], shapes=[], group_name="weights", finished=True)[0] == 200
    )
    assert pair.state()["state"] == "serving"
    assert pair.holds(tensors) == []


def test_sglangs_begin_and_end_with_weight_version(pair: Server, sender: Sender, seed: int) -> None:
    tensors = checkpoint(seed, draft=True)
    before = pair.state()["weight_version"]
    assert pair.post("/begin_weight_update", selector="all")[0] == 200
    first, rest = _split(tensors)
    sender.send(first, flush_cache=False)
    sender.send(rest, flush_cache=True, weight_version="sg@12")
    assert pair.state()["weight_version"] is None
    assert pair.post("/end_weight_update") == (200, "version sg@12 with 8 tensors, not verified: no digest was given")
    assert pair.state()["weight_version"] == "sg@12" != before
    assert pair.holds(tensors, 0) == []


def test_loader_that_raises_on_one_rank_leaves_the_engine_dirty_until_all_is_sent_again(
    pair: Server, sender: Sender, seed: int
) -> None:
    tensors = checkpoint(seed, draft=True)
    pair.fault(1, raise_at="head.weight")
    pair.post("/begin_weight_update")
    first, rest = _split(tensors)
    sender.send(first)
    status, message = sender.send(rest)
    assert status == 400
    assert "rank1: the module loader raised" in message
    assert "no room for head.weight" in message
    assert "rank0" not in message
    assert pair.post("/commit_weight_update")[0] == 400
    state = pair.state()
    assert (state["state"], state["weight_version"]) == ("dirty", None)
    assert "resume" not in pair.calls()
    assert pair.post("/end_weight_update")[0] == 200
    assert pair.state()["state"] == "dirty"
    assert pair.post("/begin_weight_update", partial=True)[0] == 400
    pair.fault(1)
    assert pair.post("/begin_weight_update")[0] == 200
    assert sender.send(tensors)[0] == 200  # the group outlives a loader's error
    assert pair.post("/commit_weight_update", digests=_digests(tensors))[0] == 200
    assert pair.state()["state"] == "serving"
    assert [pair.holds(tensors, rank) for rank in range(2)] == [[], []]


def test_every_ranks_failure_is_reported(pair: Server, sender: Sender, seed: int) -> None:
    for rank in range(2):
        pair.fault(rank, raise_at="embed.weight")
    status, message = sender.send(checkpoint(seed))
    assert status == 400
    assert "rank0: " in message
    assert " | rank1: " in message


@pytest.mark.parametrize("tell", ["digest", "digests"])
def test_bytes_that_are_not_what_was_sent_are_never_served(pair: Server, sender: Sender, seed: int, tell: str) -> None:
    tensors = checkpoint(seed, draft=True)
    pair.fault(1, spoil="layers.1.up.weight")
    assert sender.send(tensors)[0] == 200
    said = {"digest": _fold(tensors)} if tell == "digest" else {"digests": _digests(tensors)}
    status, message = pair.post("/commit_weight_update", **said)
    assert status == 400
    assert "VerificationError: rank1" in message
    assert tell == "digest" or "layers.1.up.weight" in message
    assert pair.state()["state"] == "dirty"
    assert not {"resume", "flush"} & set(pair.calls())


def test_ranks_that_differ_are_never_served_even_without_a_digest(pair: Server, sender: Sender, seed: int) -> None:
    pair.fault(0, spoil="embed.weight")
    sender.send(checkpoint(seed, draft=True))
    status, message = pair.post("/commit_weight_update")
    assert status == 400
    assert "different bytes" in message


def test_cache_that_is_not_dropped_fails_the_update(pair: Server, sender: Sender, seed: int) -> None:
    pair.fault(0, refuse_flush="yes")
    sender.send(checkpoint(seed, draft=True))
    assert pair.post("/commit_weight_update")[0] == 400
    assert pair.state()["state"] == "dirty"
    assert "resume" not in pair.calls()


def test_rank_that_does_not_resume_stops_the_others_too(pair: Server, sender: Sender, seed: int) -> None:
    pair.fault(1, refuse_resume="yes")
    tensors = checkpoint(seed, draft=True)
    sender.send(tensors)
    pair.calls()
    status, message = pair.post("/commit_weight_update", digests=_digests(tensors))
    assert (status, "rank1: RuntimeError: cannot resume" in message) == (400, True)
    assert pair.state()["state"] == "dirty"
    calls = pair.calls()
    assert calls[-3:] == ["pause abort"] * 3  # rank 1's draft was not resumed yet: it is paused
    assert calls[-4] != "pause abort"
    assert "resume" in calls


def test_wrong_requests_are_refused_before_any_collective_and_change_nothing(pair: Server, sender: Sender, seed: int) -> None:
    tensors = checkpoint(seed, draft=True)
    good = sender.body(tensors)
    state = pair.state()
    wrong: list[tuple[dict[str, object], str]] = [
        ({"group_name": "nobody"}, "not initialized"),
        ({"names": good["names"][1:]}, "as many of each"),
        ({"dtypes": ["bfloat16"] * 7}, "as many of each"),
        ({"dtypes": ["complex256"] * 8}, "unknown dtypes"),
        ({"dtypes": ["float64"] * 8}, "convert it before sending"),
        ({"shapes": [[1]] * 8}, "shape of"),
        ({"shapes": [[1 << 60, 1 << 60]] * 8}, "shape of"),
        ({"shapes": [[-1, 2]] * 8}, "shapes"),
        ({"names": ["embed.weight"] * 8}, "twice"),
        ({"names": ["other", *good["names"][1:]]}, "unknown to the engine"),
        ({"load_format": "flattened_bucket"}, "one dtype"),
        ({"load_format": "pickle"}, "load_format"),
        ({"names": [], "dtypes": [], "shapes": []}, "does nothing"),
        ({"names": [], "dtypes": [], "shapes": [], "finished": True}, "not one tensor"),
        ({"finished": True, "digests": {"embed.weight": "0" * 16}}, "no digest for"),
        ({"finished": True, "digests": {"other": "0" * 16}}, "not received"),
        ({"weight_version": "newest"}, "not a version"),
        ({"timeout": -1}, "timeout"),
    ]
    for change, complaint in wrong:
        started = time.monotonic()
        status, message = pair.post("/update_weights_from_distributed", **(good | change))
        assert (status, complaint in message) == (400, True), (change, message)
        assert time.monotonic() - started < 5
    first = {name: tensors[name] for name in ("embed.weight", "head.weight")}
    status, message = pair.post("/update_weights_from_distributed", **sender.body(first, finished=True))
    assert (status, "6 of 8 tensors were not received" in message) == (400, True)
    assert pair.state() == state
    assert pair.calls() == []
    assert sender.send(tensors)[0] == 200  # and the group is still good


def test_groups_are_named_many_and_checked(pair: Server, sender: Sender, seed: int) -> None:
    assert pair.post("/init_weights_update_group", **sender.init) == (
        400,
        "ConfigurationError: group 'weights' is already initialized; destroy it first, or use another name",
    )
    for change in ({"world_size": 2}, {"backend": "mpi"}, {"rank_offset": 0}, {"group_name": "a/b"}, {"master_port": 0}):
        assert pair.post("/init_weights_update_group", **(sender.init | {"group_name": "other"} | change))[0] == 400
    assert pair.post("/init_weights_update_group", **(sender.init | {"group_name": "gpu", "backend": "nccl"}))[0] == 400
    tensors = checkpoint(seed, draft=True)
    second = Sender(pair, "second", ranks=2)
    assert pair.state()["groups"] == ["second", "weights"]
    for one, bucket in zip((sender, second), _split(tensors), strict=True):
        assert one.send(bucket)[0] == 200
    assert pair.post("/commit_weight_update", digests=_digests(tensors))[0] == 200
    assert pair.holds(tensors) == []
    assert pair.post("/destroy_weights_update_group", group_name="second")[0] == 200
    assert pair.post("/destroy_weights_update_group", group_name="second") == (
        400,
        "MembershipError: group 'second' is not initialized; initialized: weights",
    )
    with pytest.raises(PeerLost):
        second.group.broadcast([torch.zeros(1 << 20)], Deadline(5))


def test_group_that_nobody_completes_ends_at_its_deadline_and_can_be_tried_again(pair: Server) -> None:
    rendezvous = StoreRendezvous("127.0.0.1", 3, Deadline(5))
    wish = {
        "master_address": "127.0.0.1", "master_port": rendezvous.port, "rank_offset": 1, "world_size": 3, "group_name": "late",
        "backend": "gloo", "timeout": 1.0,
    }  # fmt: skip
    started = time.monotonic()
    status, message = pair.post("/init_weights_update_group", **wish)
    assert status == 400
    assert "rank0: " in message
    assert time.monotonic() - started < 6
    assert pair.state()["groups"] == []
    Sender(pair, "late", ranks=2).close()
    assert pair.post("/destroy_weights_update_group", group_name="late")[0] == 200


def test_trainer_that_never_broadcasts_gets_its_answer_by_the_deadline(pair: Server, sender: Sender, seed: int) -> None:
    started = time.monotonic()
    status, message = pair.post("/update_weights_from_distributed", **sender.body(checkpoint(seed), timeout=1.0))
    assert (status, "did not finish within" in message) == (400, True), message
    assert time.monotonic() - started < 8
    assert pair.state()["state"] == "dirty"
    assert pair.state()["groups"] == []  # it may stand at another collective than the trainer
    with pytest.raises((PeerLost, DeadlineExceeded)):
        sender.group.broadcast([torch.zeros(1 << 20)], Deadline(5))


def test_trainer_that_goes_away_in_the_middle_is_noticed_at_once(pair: Server, sender: Sender, seed: int) -> None:
    tensors = checkpoint(seed)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(pair.post, "/update_weights_from_distributed", **sender.body(tensors))
        sender.group.broadcast([tensors["embed.weight"]], Deadline(10))  # the first of seven
        sender.close()
        assert reply.result(10)[0] == 400
    assert time.monotonic() - started < 8
    assert pair.state()["state"] == "dirty"


def test_server_that_is_killed_in_the_middle_is_noticed_by_the_trainer(seed: int) -> None:
    with serving(ranks=1) as server:
        sender = Sender(server, ranks=1, seconds=8)
        server.process.kill()
        with pytest.raises((PeerLost, DeadlineExceeded)):
            sender.group.broadcast([torch.zeros(1 << 24)], Deadline(8))
        sender.close()


def test_update_that_takes_too_long_is_over(seed: int) -> None:
    with serving(ranks=1, settings={"update_timeout": 1.0}) as server:
        assert server.post("/begin_weight_update")[0] == 200
        assert server.post("/begin_weight_update")[0] == 400
        deadline = Deadline(20)
        while server.state()["state"] != "dirty":
            deadline.remaining("the update to end")
        status, message = server.post("/commit_weight_update")
        assert (status, "no update runs" in message) == (400, True)
        assert server.post("/begin_weight_update")[0] == 200


@pytest.mark.parametrize("packing", ["elements", "bytes"])
def test_flattened_buckets(packing: str, seed: int) -> None:
    tensors = checkpoint(seed)
    kinds = {dtype for _, dtype in SHAPES.values()}
    with serving(ranks=1, packing=packing) as server:
        sender = Sender(server)
        if packing == "bytes":
            assert sender.send(tensors, load_format="flattened_bucket")[0] == 200
        else:
            for kind in kinds:
                part = {name: tensor for name, tensor in tensors.items() if tensor.dtype == kind}
                assert sender.send(part, load_format="flattened_bucket")[0] == 200
        assert server.post("/commit_weight_update", digest=_fold(tensors))[0] == 200
        assert server.holds(tensors) == []
        sender.close()


def test_who_may_update_and_how_much_at_once(seed: int) -> None:
    with serving(ranks=1, token="s3cret", settings={"max_bucket_bytes": 100, "require_digest": True}) as server:
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
            for method, path in (
                ("POST", "/begin_weight_update"),
                ("POST", "/init_weights_update_group"),
                ("GET", "/weight_update"),
            ):
                assert server.http.request(method, path, headers=headers, json={}).status_code == 401
        assert server.http.post("/begin_weight_update", content=b"{}").status_code == 400  # says no content type
        json = {"Content-Type": "application/json"}
        assert server.http.post("/begin_weight_update", content=b"{", headers=json).status_code == 400
        assert server.http.post("/begin_weight_update", content=b"[" * 100_000, headers=json).status_code == 400
        sender = Sender(server)
        tensors = checkpoint(seed)
        status, message = server.post("/update_weights_from_distributed", **sender.body(tensors))
        assert (status, "100 at most" in message) == (400, True)
        for name, tensor in tensors.items():  # one alone may be larger
            assert sender.send({name: tensor})[0] == 200
        assert server.post("/commit_weight_update")[0] == 400
        assert server.post("/commit_weight_update", digest=_fold(tensors), weight_version="9")[0] == 200
        assert server.post("/begin_weight_update", weight_version="8")[0] == 400
        assert server.post("/begin_weight_update", partial=True)[0] == 200
        one = {"norm.scale": checkpoint(seed + 1)["norm.scale"]}
        assert sender.send(one)[0] == 200
        assert server.post("/commit_weight_update", digests=_digests(one), weight_version="10")[0] == 200
        assert server.holds(tensors | one) == []
        sender.close()


def test_draft_names_are_not_those_of_the_main_model() -> None:
    assert all(name.startswith("mtp.") for name in DRAFT)
    assert not any(name.startswith("mtp.") for name in SHAPES)
