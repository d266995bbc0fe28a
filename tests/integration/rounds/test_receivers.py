"""Receivers at the end of a stream, or of a publication of shards, and what closing and forking do to both ends."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from weightsync.config import ClientSettings, ServerSettings
from weightsync.coordinator import agreement
from weightsync.engine.receiver import Receiver, _Handover
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, RoundFailed
from weightsync.integrations import stream_ranks
from weightsync.integrations.stream_options import Options
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import manifest_of
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

SECONDS = 20.0


def test_a_receiver_that_is_closed_after_its_loop_has_taken_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    resume = _Handover.resume

    def slow(handover: _Handover) -> None:
        resume(handover)  # ends the loop
        time.sleep(0.3)  # before the coordinator hears of it

    monkeypatch.setattr(_Handover, "resume", slow)
    sent = {f"layers.{number}": torch.randn(64, 33) for number in range(8)}
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer(Stream(window_bytes=1 << 14), server.url, token=server.token, rank=0, world_size=1) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        receiver = Receiver("r0", server.url, token=server.token)
        publishing = pool.submit(trainer.publish_stream, iter(sent.items()), timeout=SECONDS)
        received = {name: tensor.clone() for batch in receiver.receive(SECONDS) for name, tensor in batch}
        receiver.close()
        assert [replica.error for replica in publishing.result(SECONDS).replicas] == [None]
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[name], sent[name]) for name in sent)


def test_a_receiver_of_shards_warns_of_no_loader_that_is_not_its_own(caplog: pytest.LogCaptureFixture) -> None:
    sent = {"weight": torch.randn(96, 40)}
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer(sent, server.url, token=server.token, rank=0, world_size=1, seeds=False) as trainer,
        Receiver("r0", server.url, token=server.token, manifest=manifest_of(sent)) as receiver,
        ThreadPoolExecutor(1) as pool,
        caplog.at_level("INFO", "weightsync"),
    ):
        publishing = pool.submit(trainer.publish, timeout=SECONDS)
        assert [name for batch in receiver.receive(SECONDS) for name, _ in batch] == ["weight"]
        assert publishing.result(SECONDS).ok
    assert "verified as received" in caplog.text
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("shards", [False, True], ids=["stream", "shards"])
def test_receivers_that_leave_right_after_their_loops_have_taken_the_version(shards: bool) -> None:
    """The last answer of such a receiver and its goodbye arrive together."""
    sent = {f"layers.{number}": torch.randn(96, 40) for number in range(9)}
    manifest = manifest_of(sent) if shards else None
    errors: list[str | None] = []

    def receive(name: str) -> None:
        with Receiver(name, server.url, token=server.token, manifest=manifest) as receiver:
            for _ in receiver.receive(SECONDS):
                pass

    with ExitStack() as owned:
        server = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))
        pool = owned.enter_context(ThreadPoolExecutor(2))
        token, given = server.token, sent if shards else Stream(window_bytes=1 << 15)
        trainer = owned.enter_context(Trainer(given, server.url, token=token, rank=0, world_size=1, seeds=not shards))
        for _ in range(15):
            receiving = [pool.submit(receive, name) for name in ("a", "b")]
            trainer.wait_for_replicas(0, SECONDS, names=("a", "b"))
            published = trainer.publish(timeout=SECONDS) if shards else trainer.publish_stream(iter(sent.items()), timeout=SECONDS)
            errors += [replica.error for replica in published.replicas]
            for one in receiving:
                one.result(SECONDS)
    assert errors == [None] * 30


def test_a_receiver_with_the_manifest_takes_what_a_module_publishes_and_no_version_from_before_it_joined() -> None:
    held = {"norm": torch.randn(33), "layers.0": torch.randn(64, 33), "layers.1": torch.randn(64, 33)}
    held["tied"] = held["norm"]
    manifest = manifest_of(held)
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer(held, server.url, token=server.token, rank=0, world_size=1, seeds=False) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        with pytest.raises(ConfigurationError, match="seeds=False"):
            trainer.publish_async(0)
        for number in (1, 2):
            with Receiver(f"r{number}", server.url, token=server.token, manifest=manifest, bucket_bytes=1 << 13) as receiver:
                with pytest.raises(DeadlineExceeded):
                    next(receiver.receive(0.3))
                trainer.wait_for_replicas(1, SECONDS)
                held["layers.1"] += 1
                publishing = pool.submit(trainer.publish, number, timeout=SECONDS)
                received = {name: tensor.clone() for batch in receiver.receive(SECONDS) for name, tensor in batch}
                (replica,) = publishing.result(SECONDS).replicas
                assert (replica.error, replica.delivery, replica.nbytes) == (None, "streamed", manifest.nbytes)
                assert received.keys() == {"norm", "layers.0", "layers.1"}
                assert all(torch.equal(received[name], held[name]) for name in received)


def test_a_stream_that_fails_while_a_receiver_is_still_prepared_fails_its_loop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(*_: object) -> None:
        await asyncio.sleep(10 * SECONDS)

    monkeypatch.setattr(agreement, "open_stream", endless)  # ahead of the round, as the receiver has joined

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "layers.0", torch.zeros(8)
        raise ValueError("cannot be gathered")

    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer(Stream(window_bytes=1 << 14), server.url, token=server.token, rank=0, world_size=1) as trainer,
        Receiver("r0", server.url, token=server.token) as receiver,
        ThreadPoolExecutor(1) as pool,
    ):
        receiving = pool.submit(list, receiver.receive(SECONDS))
        trainer.wait_for_replicas(1, SECONDS)
        with pytest.raises(ValueError, match="cannot be gathered"):
            trainer.publish_stream(broken(), timeout=SECONDS)
        with pytest.raises(RoundFailed, match="cannot be gathered"):
            receiving.result(SECONDS / 2)


def test_a_stream_that_fails_before_the_receivers_first_loop_fails_that_loop_at_once_and_no_later_one() -> None:
    """A framework's rank joins for one update, and the trainer may fail before this rank is ready to receive."""

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "layers.0", torch.zeros(8)
        raise ValueError("cannot be gathered")

    def receive(receiver: Receiver) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for batch in receiver.receive(SECONDS) for name, tensor in batch}

    sent = {"layers.0": torch.randn(8)}
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer(Stream(window_bytes=1 << 14), server.url, token=server.token, rank=0, world_size=1) as trainer,
        Receiver("r0", server.url, token=server.token) as receiver,
        ThreadPoolExecutor(1) as pool,
    ):
        trainer.wait_for_replicas(1, SECONDS)
        with pytest.raises(ValueError, match="cannot be gathered"):
            trainer.publish_stream(broken(), timeout=SECONDS)
        publishing = pool.submit(trainer.publish_stream, iter(sent.items()), timeout=SECONDS)
        with pytest.raises(RoundFailed, match="cannot be gathered"):
            receive(receiver)
        assert torch.equal(receive(receiver)["layers.0"], sent["layers.0"])
        assert publishing.result(SECONDS).ok
        with pytest.raises(ValueError, match="cannot be gathered"):
            trainer.publish_stream(broken(), timeout=SECONDS)
        publishing = pool.submit(trainer.publish_stream, iter(sent.items()), timeout=SECONDS)
        assert torch.equal(receive(receiver)["layers.0"], sent["layers.0"]), "the application was busy, and receives the next one"
        assert publishing.result(SECONDS).ok


def test_a_trainer_that_is_closed_before_its_stream_was_asked_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.trainer.trainer._CLOSING_SECONDS", 0.5)
    drained, begun, release = [], threading.Event(), threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        begun.set()
        for number in range(3):
            drained.append(number)
            yield f"layers.{number}", torch.zeros(8)

    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer(Stream(window_bytes=1 << 14), server.url, token=server.token, rank=0, world_size=1) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        trainer._background.submit(release.wait, SECONDS)  # what asks the coordinator has not begun
        publishing = pool.submit(trainer.publish_stream, tensors(), timeout=SECONDS)
        assert begun.wait(SECONDS)
        trainer.close()
        release.set()
        with pytest.raises(Aborted):
            publishing.result(SECONDS)
    assert drained == [0, 1, 2]


def test_a_publication_in_the_background_that_had_not_begun_at_the_close_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.trainer.trainer._CLOSING_SECONDS", 0.5)
    release = threading.Event()
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer({"w": torch.zeros(8)}, server.url, token=server.token, rank=0, world_size=1) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        trainer._background.submit(release.wait, SECONDS)
        publishing = pool.submit(trainer.publish_async, 1, timeout=SECONDS)
        with pytest.raises(TimeoutError):
            publishing.result(0.3)
        trainer.close()
        release.set()
        with pytest.raises(Aborted):
            publishing.result(SECONDS)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_receiver_refuses_to_receive_in_a_forked_child_at_once() -> None:
    with BackgroundServer(ServerSettings.load({}, port=0)) as server, Receiver("r0", server.url, token=server.token) as receiver:
        child = os.fork()
        if not child:
            status = 1
            try:
                next(receiver.receive(SECONDS))
            except ConfigurationError:
                receiver.close()
                status = 0
            except BaseException:  # noqa: BLE001 - the child must not unwind into pytest
                traceback.print_exc()
            finally:
                os._exit(status)
        since = time.monotonic()
        assert os.waitpid(child, 0)[1] == 0
        assert time.monotonic() - since < SECONDS / 2


def test_a_rank_that_is_cancelled_while_it_joins_leaves_as_soon_as_it_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, let, left = threading.Event(), threading.Event(), threading.Event()
    join = stream_ranks.join

    class Watched(Receiver):
        def close(self) -> None:
            super().close()
            left.set()

    def slow(*args: Any) -> Receiver:
        asked.set()
        assert let.wait(SECONDS)
        return join(*args)

    async def cancelled(meeting: stream_ranks.Meeting) -> None:
        joining = asyncio.create_task(stream_ranks.join_async("r0", meeting, Options(), None))
        await asyncio.to_thread(asked.wait, SECONDS)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining

    monkeypatch.setattr(stream_ranks, "join", slow)
    monkeypatch.setattr(stream_ranks, "Receiver", Watched)
    with BackgroundServer(ServerSettings.load({}, port=0)) as server:
        monkeypatch.setenv("WEIGHTSYNC_TOKEN", server.token)
        asyncio.run(cancelled(stream_ranks.Meeting(server.url, SECONDS)))
        let.set()
        assert left.wait(SECONDS)
        with Client(ClientSettings.load(coordinator=server.url)) as client:
            assert [replica.state for replica in client.status().replicas] == ["left"]
