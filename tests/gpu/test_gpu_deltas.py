"""Rounds between GPUs that move only what changed: from parameters in place and from a copy, undone, and whole where they must."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from tests.gpu.engine_process import Model, fingerprint
from tests.gpu.processes import Joined, change, far
from tests.integration.rounds.test_deltas import gate, only  # noqa: F401 - one is a fixture
from tests.integration.rounds.test_quantized import Served, assert_serves, quantized
from tests.integration.rounds.test_some_tensors import Loader

from weightsync import failpoints
from weightsync.config import ServerSettings
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError
from weightsync.publishing import published_shards
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer
from weightsync_nixl.agent import nixl_problem

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::DeprecationWarning")]
pytest.importorskip("triton", reason="needs Triton")
needs_nixl = pytest.mark.skipif(nixl_problem() is not None, reason=nixl_problem() or "")


@pytest.fixture
def joined() -> Iterator[Joined]:
    settings = ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0"}, port=0)  # replicas that failed are in the result
    with BackgroundServer(settings) as server, ExitStack() as owned:
        yield Joined(server, owned)


def step(module: torch.nn.Module, share: float = 0.01) -> None:
    """Change so many of the elements, by a bit of their upper half."""
    with torch.no_grad():
        for parameter in {id(value): value for value in module.parameters()}.values():
            words = parameter.view({2: torch.int16, 4: torch.int32}[parameter.element_size()])
            words ^= (torch.rand(words.shape, device=words.device) < share).to(words.dtype) << 8 * (words.element_size() - 2)


def models() -> tuple[Model, Model]:
    source, target = Model().to("cuda:0"), Model().to(far())
    change(source, 0)
    return source, target


def publishes_what_changes(trainer: Trainer, source: Model, target: Model, whole: int) -> None:
    """Four more versions, the last one without a change."""
    for number in range(2, 6):
        step(source, 0.01 if number < 5 else 0.0)
        changed = only(trainer)
        assert (changed.base, changed.verified, changed.version) == (number - 1, "installed", number)
        assert changed.nbytes < whole / 10
        assert fingerprint(source) == fingerprint(target)


@pytest.mark.parametrize("transport", ["cuda_ipc", pytest.param("nixl", marks=needs_nixl)])
def test_only_what_changed_moves_from_parameters_in_place(joined: Joined, transport: str) -> None:
    source, target = models()
    trainer = joined.trainer(source, deltas=True, transports=[transport])
    joined.engine(ModuleAdapter(target), transports=[transport])
    trainer.wait_for_replicas()
    whole = only(trainer)
    assert (whole.base, whole.verified, whole.transports) == (None, "installed", (transport,))
    publishes_what_changes(trainer, source, target, whole.nbytes)


class OnDevice(Loader):
    """Has a loader that takes buckets on the device, and nothing else: digests are those of the buckets."""

    def device(self) -> torch.device | None:
        return next(self.module.parameters()).device


@pytest.mark.parametrize("adapter", [ModuleAdapter, OnDevice])
@pytest.mark.parametrize("buckets", [1, 2])
def test_tensors_that_changed_are_streamed_through_buckets_on_the_device(
    joined: Joined, adapter: type[ModuleAdapter] | type[OnDevice], buckets: int
) -> None:
    source, target = models()
    trainer = joined.trainer(source, deltas=True, transports=["cuda_ipc"])
    joined.engine(adapter(target), transports=["cuda_ipc"], delivery="streamed", bucket_bytes=1 << 16, staging_buckets=buckets)
    trainer.wait_for_replicas()
    assert only(trainer).base is None
    for number, (name, parameter) in enumerate(list(source.named_parameters())[:3], 2):
        with torch.no_grad():
            parameter.add_(1)
        changed = only(trainer)
        verified = "received" if adapter is OnDevice else "installed"
        assert (changed.base, changed.verified, changed.nbytes) == (number - 1, verified, parameter.nbytes), name
        assert fingerprint(source) == fingerprint(target)


def test_only_what_changed_moves_from_a_copy(joined: Joined) -> None:
    """Float32 at the trainer, bfloat16 at the engine: what rounds to the same bits has not changed."""
    source = torch.nn.Sequential(torch.nn.Linear(600, 900), torch.nn.LayerNorm(900), torch.nn.Linear(900, 7)).to("cuda:0")
    target = torch.nn.Sequential(torch.nn.Linear(600, 900), torch.nn.LayerNorm(900), torch.nn.Linear(900, 7)).bfloat16().to(far())
    trainer = joined.trainer(source, deltas=True, dtype=torch.bfloat16)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    whole = only(trainer)
    assert whole.transports == ("cuda_ipc",)
    for number in range(2, 5):
        step(source)
        with torch.no_grad():
            source.get_parameter("0.weight")[:5].view(torch.int32)[:] ^= 1
        changed = only(trainer)
        assert (changed.base, changed.verified) == (number - 1, "installed")
        assert changed.nbytes < whole.nbytes / 10
        assert all(torch.equal(a.bfloat16().cpu(), b.cpu()) for a, b in zip(source.parameters(), target.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-channel", "fp8-tensor", "mxfp4", "nvfp4", "int4-group128"])
def test_only_what_changed_moves_of_quantized_weights(joined: Joined, kind: str) -> None:
    """Words that are changed keep their magnitudes, so that no scale changes. An update that fails leaves the base's lists."""
    source = torch.nn.Sequential(torch.nn.Linear(512, 1000), torch.nn.LayerNorm(1000)).to("cuda:0")

    def served() -> dict[str, torch.Tensor]:
        return quantized(copy.deepcopy(source).bfloat16().cpu(), {"0.weight": kind})

    target = Served(served()).to(far())
    trainer = joined.trainer(source, deltas=True, dtype=torch.bfloat16, quantize={"0.weight": kind})
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    whole = only(trainer)
    assert (whole.base, whole.verified, whole.transports) == (None, "installed", ("cuda_ipc",))
    matrix, base = source.get_parameter("0.weight"), whole.version
    for number in range(2, 6):
        with torch.no_grad():
            matrix.copy_(torch.where(torch.rand(matrix.shape, device="cuda:0") < 0.001, -matrix, matrix))
            if number == 4:
                held, matrix[7, 7] = matrix[7, 7].clone(), float("inf")
                with pytest.raises(ConfigurationError, match=r"0\.weight holds Inf or NaN"):
                    trainer.publish()
                matrix[7, 7] = held
        changed = only(trainer)
        assert (changed.base, changed.verified) == (base, "installed")
        assert changed.nbytes < whole.nbytes / 10
        assert_serves(copy.deepcopy(target).cpu(), served())
        base = changed.version
    trainer.close()


def test_too_many_changes_move_whole(joined: Joined) -> None:
    source, target = models()
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)
    step(source, 0.9)
    assert only(trainer).base is None
    step(source)
    assert only(trainer).base == 2
    assert fingerprint(source) == fingerprint(target)


def test_where_only_lists_find_room_the_last_version_is_in_host_memory(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["the GPU is full", None])
    monkeypatch.setattr(published_shards, "room_for_copy", lambda nbytes, device: next(answers))
    source, target = models()
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    whole = only(trainer)
    assert next(answers, "asked twice") == "asked twice"
    publishes_what_changes(trainer, source, target, whole.nbytes)
    trainer.close()


def test_where_the_last_version_finds_no_room_all_bytes_move(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_shards, "room_for_copy", lambda nbytes, device: "no room in this test")
    source, target = models()
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)
    step(source)
    assert only(trainer).base is None
    assert fingerprint(source) == fingerprint(target)


def test_parameters_that_moved_and_parameters_that_were_changed_get_all_bytes(joined: Joined) -> None:
    source, target = models()
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)
    for parameter in target.parameters():
        if parameter is not target.embed.weight:
            parameter.data = parameter.data.clone()
    step(source)
    assert only(trainer).base is None
    assert fingerprint(source) == fingerprint(target)
    with torch.no_grad():
        target.large[7, 7] += 64.0
    step(source)
    assert only(trainer).base is None
    assert fingerprint(source) == fingerprint(target)


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("point", ["engine.move", "engine.applied", "engine.moved"])
def test_a_replica_whose_update_fails_serves_the_base_on(joined: Joined, point: str) -> None:
    source, target = models()
    trainer = joined.trainer(source, deltas=True)
    engine = joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)
    before = fingerprint(target)
    step(source)

    def fail(name: str) -> None:
        if name == point:
            raise OSError("the disk of this test is full")

    failpoints.install(fail)
    replica = only(trainer)
    failpoints.install(lambda name: None)
    assert (replica.state, replica.version, replica.base) == ("loaded", 1, None)
    assert "full" in str(replica.error)
    assert fingerprint(target) == before
    assert engine.serving is not None and engine.serving.number == 1
    step(source)
    replica = only(trainer)
    assert (replica.error, replica.base) == (None, 1)  # what changed in both versions, in one step
    assert fingerprint(source) == fingerprint(target)


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("kept", ["in place", "copied", "on the host"])
def test_a_replica_that_missed_versions_gets_all_changes_since_its_own(
    joined: Joined, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept == "on the host":
        answers = iter(["the GPU is full", None])
        monkeypatch.setattr(published_shards, "room_for_copy", lambda nbytes, device: next(answers))
    source, target = models()
    if kept == "copied":
        source, target = source.float(), target.bfloat16()
    trainer = joined.trainer(source, deltas=True, dtype=torch.bfloat16 if kept == "copied" else None)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)

    def fail(name: str) -> None:
        if name == "engine.move":
            raise OSError("the disk of this test is full")

    for missed in (1, 3):
        failpoints.install(fail)
        for _ in range(missed):
            step(source)
            assert only(trainer).state == "loaded"
        failpoints.install(lambda name: None)
        step(source)
        replica = only(trainer)
        assert replica.version is not None
        assert (replica.error, replica.verified, replica.base) == (None, "installed", replica.version - missed - 1)
        assert all(torch.equal(a.to(b.dtype).cpu(), b.cpu()) for a, b in zip(source.parameters(), target.parameters(), strict=True))
