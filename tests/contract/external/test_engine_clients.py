"""Holds every engine's client to one contract, against servers that enforce what the engines document; faults included."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.integration.external.disaggregated_server import checkpoint
from tests.integration.external.disaggregated_support import Server, serving

from weightsync.config import Secret
from weightsync.deadline import Deadline
from weightsync.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceeded,
    LoadError,
    ManifestMismatch,
    PeerLost,
    VerificationError,
    WeightSyncError,
)
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.digest import digest_box
from weightsync.tensors.shards import manifest_of
from weightsync_disaggregated.clients.base import Bucket, UpdateClient
from weightsync_disaggregated.clients.lmdeploy import LMDeployClient
from weightsync_disaggregated.clients.sglang import SGLangClient
from weightsync_disaggregated.clients.vllm import VLLMClient
from weightsync_disaggregated.clients.weightsync import WeightUpdateClient

CLIENTS: dict[str, type[UpdateClient]] = {
    "lmdeploy": LMDeployClient,
    "sglang": SGLangClient,
    "vllm": VLLMClient,
    "weightsync": WeightUpdateClient,
}
KEEPS_VERSION = {"sglang", "vllm", "weightsync"}

pytestmark = pytest.mark.usefixtures("first_gloo_group", "no_leaks")


def _program(engine: str) -> str:
    return (
        "tests.integration.external.disaggregated_server"
        if engine == "weightsync"
        else "tests.contract.external.conformance_server"
    )


@pytest.fixture(scope="module", params=sorted(CLIENTS))
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(engine: str) -> Iterator[Server]:
    with serving(_program(engine), engine=engine) as made:
        yield made


@pytest.fixture
def client(engine: str, server: Server) -> Iterator[UpdateClient]:
    with CLIENTS[engine](server.url, backend="gloo") as made:
        yield made
    server.fault()
    server.calls()


def _buckets(tensors: dict[str, torch.Tensor]) -> list[Bucket]:
    """One for each dtype; the last has the tensors that come last."""
    found = []
    for kind in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        part = {name: tensor for name, tensor in tensors.items() if tensor.dtype == kind}
        memory = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in part.values()])
        specs = [TensorSpec(name, tuple(tensor.shape), str(kind).removeprefix("torch.")) for name, tensor in part.items()]
        found.append(Bucket(specs, memory))
    return found


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{digest_box(t, t.shape, [0] * t.dim()):016x}" for name, t in tensors.items()}


def _send(client: UpdateClient, buckets: Sequence[Bucket], deadline: Deadline) -> None:
    for number, bucket in enumerate(buckets):
        client.update(bucket, number == len(buckets) - 1, deadline)


def _push(client: UpdateClient, tensors: dict[str, torch.Tensor], label: str) -> str:
    deadline = Deadline(20)
    client.pause("abort", deadline)
    client.begin(label, manifest_of(tensors).fingerprint, deadline)
    _send(client, _buckets(tensors), deadline)
    said = client.commit(_digests(tensors), deadline)
    client.flush(deadline)
    client.resume(deadline)
    return said


def test_updates_are_installed_bit_for_bit_and_labelled(engine: str, server: Server, client: UpdateClient, seed: int) -> None:
    client.join(Deadline(20))
    for number in (1, 2):  # changed weights the second time, or stale ones stay invisible
        tensors = checkpoint(seed + number)
        assert server.holds(tensors)
        said = _push(client, tensors, f"run@{number}")
        assert server.holds(tensors) == []
        assert ("verified as" in said) is client.verifies
        assert client.version(Deadline(10)) == (f"run@{number}" if engine in KEEPS_VERSION else None)
        calls = server.calls()
        assert sum(call.startswith("load") for call in calls) == len(tensors)
        assert calls.count("finalize") == (engine in ("lmdeploy", "vllm"))
        assert engine == "lmdeploy" or calls.index("flush") > max(i for i, c in enumerate(calls) if c.startswith("load"))


def test_loader_that_raises_is_reported_and_everything_can_be_sent_again(
    engine: str, server: Server, client: UpdateClient, seed: int
) -> None:
    tensors = checkpoint(seed)
    deadline = Deadline(30)
    client.join(deadline)
    server.fault(raise_at="layers.1.up.weight")
    client.pause("abort", deadline)
    client.begin("run@7", manifest_of(tensors).fingerprint, deadline)
    with pytest.raises(LoadError, match=r"no room for layers\.1\.up\.weight"):
        _send(client, _buckets(tensors), deadline)
    assert client.version(deadline) != "run@7"
    client.abort(deadline)
    assert "resume" not in server.calls()
    server.fault()
    client.leave(deadline)
    client.join(deadline)
    _push(client, tensors, "run@7")
    assert server.holds(tensors) == []


def test_group_that_exists_and_one_that_does_not(engine: str, server: Server, client: UpdateClient, seed: int) -> None:
    client.join(Deadline(20))
    with CLIENTS[engine](server.url, backend="gloo") as other:
        started = time.monotonic()
        with pytest.raises((LoadError, ConfigurationError), match="already initialized"):
            other.join(Deadline(20))
        assert time.monotonic() - started < 10
        with pytest.raises(ConfigurationError, match="join first"):
            other.update(_buckets(checkpoint(seed))[0], False, Deadline(5))
    _push(client, checkpoint(seed), "run@7")  # the refused one left the group of the first alone


@pytest.mark.parametrize("what", ["shape", "name"])
def test_tensors_that_the_engine_does_not_have_end_at_once_and_not_at_the_deadline(
    engine: str, server: Server, client: UpdateClient, seed: int, what: str
) -> None:
    tensors = checkpoint(seed)
    deadline = Deadline(40)
    client.join(deadline)
    client.pause("abort", deadline)
    client.begin("run@8", manifest_of(tensors).fingerprint, deadline)
    bucket = _buckets(tensors)[0]
    first = bucket.specs[0]
    wrong = TensorSpec(first.name, (first.shape[0] * 2, first.shape[1] // 2), first.dtype)
    if what == "name":
        wrong = TensorSpec("elsewhere", first.shape, first.dtype)
    memory = torch.cat([bucket.memory, torch.zeros(1 << 22, dtype=torch.uint8)])  # more than any socket buffers
    big = TensorSpec("embed.weight.big", (1 << 21,), first.dtype)
    started = time.monotonic()
    with pytest.raises((LoadError, ManifestMismatch)):
        client.update(Bucket([wrong, *bucket.specs[1:], big], memory), False, deadline)
    assert time.monotonic() - started < 15
    client.abort(deadline)


def test_mixed_dtypes_are_refused_before_anything_is_sent(client: UpdateClient, server: Server) -> None:
    client.join(Deadline(20))
    specs = [TensorSpec("embed.weight", (37, 8), "bfloat16"), TensorSpec("norm.scale", (), "float32")]
    server.calls()
    with pytest.raises(ConfigurationError, match="one dtype"):
        client.update(Bucket(specs, torch.zeros(37 * 8 * 2 + 4, dtype=torch.uint8)), False, Deadline(10))
    assert not any(call.startswith("load") for call in server.calls())


def test_server_that_is_killed_in_the_middle_is_an_error_soon(engine: str, seed: int) -> None:
    if engine == "weightsync":
        pytest.skip("test_disaggregated.py does this")
    with serving(_program(engine), engine=engine) as server, CLIENTS[engine](server.url, backend="gloo") as client:
        tensors = checkpoint(seed)
        deadline = Deadline(30)
        client.join(deadline)
        server.fault(die_at="layers.1.up.weight")
        client.pause("abort", deadline)
        client.begin("run@9", manifest_of(tensors).fingerprint, deadline)
        started = time.monotonic()
        with pytest.raises(PeerLost):
            _send(client, _buckets(tensors), deadline)
        assert time.monotonic() - started < 15
        with pytest.raises(WeightSyncError):
            client.version(Deadline(5)) if engine in KEEPS_VERSION else client.pause("abort", Deadline(5))


def test_server_that_never_answers_is_an_error_by_the_deadline(engine: str, server: Server, client: UpdateClient) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with CLIENTS[engine](f"http://127.0.0.1:{port}", backend="gloo", address="127.0.0.1") as lonely:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                lonely.join(Deadline(1.5))
            assert time.monotonic() - started < 20


def test_wrong_token(engine: str, seed: int) -> None:
    if engine == "vllm":
        pytest.skip("vLLM does not ask for its API key on these routes")
    with serving(_program(engine), engine=engine, token="right") as server:
        with CLIENTS[engine](server.url, backend="gloo", token=Secret("wrong")) as client, pytest.raises(AuthenticationError):
            client.join(Deadline(10))
        with CLIENTS[engine](server.url, backend="gloo", token=Secret("right")) as client:
            client.join(Deadline(20))
            _push(client, checkpoint(seed), "run@1")


def test_weightsync_refuses_what_was_changed_on_the_way(engine: str, server: Server, client: UpdateClient, seed: int) -> None:
    if engine != "weightsync":
        pytest.skip("only weightsync's own routes verify")
    client.join(Deadline(20))
    tensors = checkpoint(seed)
    deadline = Deadline(20)
    client.begin("run@20", manifest_of(tensors).fingerprint, deadline)
    _send(client, _buckets(tensors), deadline)
    with pytest.raises(VerificationError, match=r"head\.weight"):
        client.commit(_digests(tensors) | {"head.weight": "0" * 16}, deadline)
    assert client.version(deadline) is None
    with pytest.raises(ManifestMismatch):
        client.begin("run@21", Manifest([TensorSpec("w", (1,), "float32")]).fingerprint, deadline)


def test_lmdeploy_started_otherwise_says_how_to_start_it(engine: str, server: Server, client: UpdateClient) -> None:
    if engine != "lmdeploy":
        pytest.skip("how LMDeploy answers without its Ray executor, or without abort handling")
    server.fault(uni_executor="yes")
    with pytest.raises(LoadError, match=r"500 Internal Server Error; .*--distributed-executor-backend ray"):
        client.join(Deadline(10))
    server.fault(no_aborts="yes")
    with pytest.raises(LoadError, match=r"501 .*--enable-abort-handling"):
        client.pause("abort", Deadline(5))
    server.fault()
    client.join(Deadline(20))


def test_vllm_that_keeps_its_cache_is_not_resumed(engine: str, server: Server, client: UpdateClient, seed: int) -> None:
    if engine != "vllm":
        pytest.skip("only vLLM answers 200 where it did not flush")
    client.join(Deadline(20))
    server.fault(refuse_flush="yes")
    with pytest.raises(LoadError, match="reset_prefix_cache"):
        _push(client, checkpoint(seed), "run@22")
    assert "resume" not in server.calls()
    server.fault()
    client.flush(Deadline(5))
    client.resume(Deadline(5))


def test_vllm_begins_again_only_after_a_session_was_given_up(engine: str, server: Server, client: UpdateClient, seed: int) -> None:
    if engine != "vllm":
        pytest.skip("another engine's sessions end otherwise")
    client.join(Deadline(20))
    client.pause("abort", Deadline(5))
    client.begin("run@30", None, Deadline(5))
    with pytest.raises(LoadError, match="started twice"):
        client.begin("run@30", None, Deadline(5))
    client.abort(Deadline(5))
    assert client.version(Deadline(5)) != "run@30"
    _push(client, checkpoint(seed), "run@31")
    assert client.version(Deadline(5)) == "run@31"


def test_modes_that_an_engine_does_not_know(engine: str, client: UpdateClient) -> None:
    unknown = {"lmdeploy": ("wait", "keep"), "sglang": ("wait",)}.get(engine, ())
    for mode in unknown:
        with pytest.raises(ConfigurationError, match="cannot pause"):
            client.pause(mode, Deadline(5))  # type: ignore[arg-type]


def test_url_that_is_none(engine: str) -> None:
    for url in ("127.0.0.1:8000", "ftp://host", "http://"):
        with pytest.raises(ConfigurationError, match="not the URL"):
            CLIENTS[engine](url)
