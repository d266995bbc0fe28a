"""Streams with deltas: what a stream brings is kept, and only what changed crosses, to engines that hold the version before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.rounds.test_quantized import Served, assert_serves
from tests.integration.rounds.test_rounds import Joined
from tests.integration.streams.test_quantized_streams import by_shards, masters

from weightsync.config import ServerSettings
from weightsync.engine.receiver import Receiver
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, ManifestMismatch, SharedMemoryTooSmall
from weightsync.server.server import BackgroundServer
from weightsync.store.objects import ObjectStore
from weightsync.trainer import kept_stream
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

SECONDS = 30.0


@pytest.fixture
def joined() -> Iterator[Joined]:
    settings = ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0"}, port=0)  # replicas that failed are in the result
    with BackgroundServer(settings) as server, ExitStack() as owned:
        yield Joined(server, owned)


class Net(torch.nn.Module):
    """Matrices, a scalar, an integer, and a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(70, 50).bfloat16(), requires_grad=False)
        self.deep = torch.nn.Parameter(torch.randn(3, 5, 7), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.ids = torch.nn.Parameter(torch.arange(9), requires_grad=False)
        self.none = torch.nn.Parameter(torch.zeros(0, 4), requires_grad=False)


def lent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A generator like a framework's: what it yielded is gone when the next one is asked for."""
    for name, value in module.state_dict().items():
        memory = value.clone()
        yield name, memory
        memory.fill_(7)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def streaming(joined: Joined, **options: object) -> Trainer:
    return joined.trainer(Stream(window_bytes=4096), deltas=True, **options)  # type: ignore[arg-type]


def test_only_what_changed_crosses_and_it_is_installed(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = streaming(joined)
    joined.engine(ModuleAdapter(target))
    assert trainer.wait_for_replicas(1, SECONDS) == ("replica-0",)
    first = trainer.publish_stream(lent(source), step=10, timeout=SECONDS)
    assert same(source, target) and first.replicas[0].base is None
    source.w.view(-1)[:8].add_(1.0)
    source.scale.add_(1)
    second = trainer.publish_stream(lent(source), step=20, timeout=SECONDS)
    (replica,) = second.replicas
    assert same(source, target) and replica.verified == "installed" and second.step == 20
    assert replica.base == first.version.number and replica.nbytes == 8 * 4 + 4
    assert set(trainer.changed) >= {"w", "scale"} and trainer.changed["w"] == pytest.approx(8 / 3500)
    assert trainer.version == second.version and second.version.number == first.version.number + 1


def test_a_replica_that_joins_later_gets_the_version_that_is_kept(joined: Joined) -> None:
    source, late = Net(), Net()
    trainer = streaming(joined)
    version = trainer.publish_stream(lent(source), timeout=SECONDS).version
    assert joined.engine(ModuleAdapter(late)).wait_for_version(version, SECONDS) == version
    assert same(source, late)


def test_an_iterator_that_fails_leaves_the_version_before_and_the_next_one_is_whole_again(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = streaming(joined)
    engine = joined.engine(ModuleAdapter(target))
    version = trainer.publish_stream(lent(source), timeout=SECONDS).version

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(70, 50).bfloat16()
        raise OSError("no gather")

    left = iter([("w", source.w), ("w", source.w), ("scale", source.scale)])
    for items, error, message in (
        (failing(), OSError, "no gather"),
        (left, ManifestMismatch, "w"),
        (iter(()), ConfigurationError, "no bytes"),
    ):
        with pytest.raises(error, match=message):
            trainer.publish_stream(items, timeout=SECONDS)
        assert next(items, None) is None
    assert engine.serving == version and same(source, target)
    source.w.add_(1.0)
    assert trainer.publish_stream(lent(source), timeout=SECONDS).version.number == version.number + 1
    assert same(source, target)


def test_another_stream_than_before_is_joined_with_again(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = streaming(joined, dtype={"w": torch.float32})
    joined.engine(ModuleAdapter(target))
    refused = trainer.publish_stream(lent(source), timeout=SECONDS)
    assert "ManifestMismatch" in str(trainer.version and refused.replicas[0].error)
    source.w = torch.nn.Parameter(source.w[:, :20].clone(), requires_grad=False)
    other = Net()
    other.w = torch.nn.Parameter(torch.zeros(70, 20), requires_grad=False)
    version = trainer.publish_stream(lent(source), timeout=SECONDS).version
    assert version.number == refused.version.number + 1
    assert joined.engine(ModuleAdapter(other), "replica-1").wait_for_version(version, SECONDS) == version
    assert torch.equal(other.w, source.w.float()) and torch.equal(other.ids, source.ids)


def test_the_same_tensors_in_another_order_are_the_same(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = streaming(joined)
    joined.engine(ModuleAdapter(target))
    first = trainer.publish_stream(lent(source), timeout=SECONDS)
    source.w.view(-1)[:3].add_(1.0)
    (replica,) = trainer.publish_stream(reversed(list(source.state_dict().items())), timeout=SECONDS).replicas
    assert replica.base == first.version.number and same(source, target)


def test_matrices_are_quantized_once(joined: Joined) -> None:
    kind, stream = "fp8-block", masters(1)
    target = Served(by_shards(stream, kind))
    trainer = streaming(joined, dtype=torch.bfloat16, quantize={"*_proj.weight": kind})
    joined.engine(ModuleAdapter(target, include_buffers=True))
    for seed in (2, 2):
        (replica,) = trainer.publish_stream(masters(seed).items(), timeout=SECONDS).replicas
        assert_serves(target, by_shards(masters(seed), kind))
    assert replica.base is not None and replica.nbytes == 0


@pytest.mark.parametrize("around", [torch.inference_mode, lambda: torch.device("meta")])
def test_what_surrounds_the_first_stream_makes_no_difference(joined: Joined, around: Any) -> None:
    source, target = Net(), Net()
    trainer = streaming(joined)
    joined.engine(ModuleAdapter(target))
    with around():
        trainer.publish_stream(source.state_dict().items(), timeout=SECONDS)
    source.w.add_(1.0)
    trainer.publish_stream(lent(source), timeout=SECONDS)
    assert same(source, target)


def test_a_new_epoch_begins_with_the_first_stream_and_lasts(joined: Joined) -> None:
    source = Net()
    with streaming(joined) as trainer:
        for _ in range(3):
            version = trainer.publish_stream(lent(source), timeout=SECONDS).version
    assert version.order == (1, 2)
    trainer = streaming(joined, new_epoch=True)
    orders = [trainer.publish_stream(lent(source), number, timeout=SECONDS).version.order for number in (1, None)]
    source.ids = torch.nn.Parameter(torch.arange(5), requires_grad=False)
    assert [*orders, trainer.publish_stream(lent(source), timeout=SECONDS).version.order] == [(2, 1), (2, 2), (2, 3)]


def test_who_waits_for_replicas_waits_on_while_the_trainer_connects_again(joined: Joined) -> None:
    trainer = streaming(joined)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trainer.wait_for_replicas, 1, SECONDS)
        trainer.publish_stream(lent(Net()), timeout=SECONDS)
        joined.engine(ModuleAdapter(Net()))
        assert waiting.result(SECONDS) == ("replica-0",)


def test_no_replica_joins_between_publications_without_seeds(joined: Joined) -> None:
    trainer = streaming(joined, seeds=False)
    version = trainer.publish_stream(lent(Net()), timeout=SECONDS).version
    with pytest.raises(DeadlineExceeded):
        joined.engine(ModuleAdapter(Net())).wait_for_version(version, 0.5)


def test_a_trainer_that_is_closed_while_it_iterates_does_not_join_again(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.trainer.trainer._CLOSING_SECONDS", 0.2)
    trainer, late = streaming(joined), Net()
    trainer.publish_stream(lent(Net()), timeout=SECONDS)

    def closing() -> Iterator[tuple[str, torch.Tensor]]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(trainer.close).result(SECONDS)
        yield "w", late.w.float()

    with pytest.raises(Aborted, match="closed"):
        trainer.publish_stream(closing(), timeout=SECONDS)
    assert joined.server.coordinator.status().trainer == ()


@pytest.mark.usefixtures("no_leaks")
def test_connecting_again_leaves_nothing_behind(joined: Joined) -> None:
    with Trainer(Stream(), joined.server.url, token=joined.server.token, deltas=True) as trainer:
        for rows in range(1, 12):
            trainer.publish_stream([("w", torch.ones(rows, 3))], timeout=SECONDS)


def test_many_tensors_are_kept_as_fast_as_others_are_published(joined: Joined) -> None:
    trainer = streaming(joined)
    started = time.monotonic()
    trainer.publish_stream(((f"w.{number}", torch.zeros(2)) for number in range(10_000)), timeout=SECONDS)
    assert time.monotonic() - started < SECONDS / 3


def test_an_engine_that_asks_for_direct_delivery_too_early_is_told_how_to_join(joined: Joined) -> None:
    streaming(joined)
    with pytest.raises(ConfigurationError, match='after the first publish_stream, or use delivery="auto"'):
        joined.engine(ModuleAdapter(Net()), "early", delivery="direct")


def test_what_only_a_plain_stream_or_a_module_has_is_refused(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = streaming(joined)
    for _ in range(2):  # before it has joined with its tensors, and after
        with pytest.raises(ConfigurationError, match=r"call publish_stream\(\)"):
            trainer.publish(timeout=SECONDS)
        trainer.publish_stream(lent(Net()), timeout=SECONDS)
    with pytest.raises(ManifestMismatch, match=r"without deltas .*\n *to receive these, make it with Receiver\(manifest="):
        Receiver("takes-any", joined.server.url, token=joined.server.token)
    with pytest.raises(ConfigurationError, match="deltas of a Stream need one trainer rank, not 2"):
        streaming(joined, rank=0, world_size=2)
    monkeypatch.setattr(kept_stream, "available_bytes", lambda: 100)
    with pytest.raises(SharedMemoryTooSmall, match=r"w needs 14,000 bytes, and 100 are free"):
        trainer.publish_stream(iter([("w", torch.zeros(70, 50))]), timeout=SECONDS)


def test_versions_of_a_stream_are_stored(joined: Joined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_STORE", str(tmp_path))
    source = Net()
    trainer = streaming(joined)
    for _ in range(2):
        source.w.view(-1)[:5].add_(1.0)
        version = trainer.publish_stream(lent(source), timeout=SECONDS).version
        assert trainer.wait_until_stored(SECONDS) == version
    assert len(list(ObjectStore(str(tmp_path)).folders())) == 1
