"""Holds the trainer's callback: real servers updated through the coordinator, named groups, failures named, a coordinator gone."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import torch
from tests.integration.external.disaggregated_server import checkpoint
from tests.integration.external.disaggregated_support import Server, serving
from tests.integration.server.service_support import fast, free_port

from weightsync.config import Address, ClientSettings, Secret, ServerSettings, Timeouts
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, AuthenticationError, ConfigurationError, CoordinatorUnreachable, DeadlineExceeded, LoadError
from weightsync.server.http_client import coordinator_http
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import manifest_of
from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group
from weightsync_callbacks.broker import FOLLOWER_HEADER, Order
from weightsync_callbacks.callbacks import RolloutCallback
from weightsync_callbacks.mail import request_until
from weightsync_callbacks.orders import CommandFollower, UpdateServers
from weightsync_callbacks.orders import Server as Where

SECONDS = 30.0


@pytest.fixture
def server(runtime: None) -> Iterator[BackgroundServer]:
    """A coordinator with the mailboxes for rollouts."""
    with BackgroundServer(ServerSettings(port=0, run="run", heartbeat=0.3, mounts=("rollouts",))) as server:
        yield server


class Admission:
    """What a rollout controller is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


@contextmanager
def following(settings: ClientSettings, servers: dict[str, Where], kind: str = "weightsync") -> Iterator[Admission]:
    """A rollout controller's process, as a thread."""
    admission, ready, loop = Admission(), threading.Event(), asyncio.new_event_loop()
    end = asyncio.Event()

    async def run() -> None:
        async with CommandFollower(settings, UpdateServers(servers, kind=kind), admission):
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(SECONDS)
        yield admission
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(SECONDS)
        loop.close()


def send(callback: RolloutCallback, name: str, tensors: dict[str, torch.Tensor], ranks: int, version: str) -> None:
    """What a trainer does, with a group of its own."""
    deadline = Deadline(SECONDS)
    rendezvous = StoreRendezvous("127.0.0.1", ranks + 1, deadline)
    joined = callback.init_group(name, "127.0.0.1", rendezvous.port, backend="gloo", world_size=ranks + 1)
    group = init_custom_process_group("gloo", 0, ranks + 1, name, deadline, rendezvous=rendezvous)
    try:
        assert "initialized" in joined.result(SECONDS)
        callback.pause("abort")
        specs = [*manifest_of(tensors)]
        for count, spec in enumerate(specs, 1):
            loaded = callback.update_from_distributed(name, [spec], last=count == len(specs), version=version, flattened=False)
            group.broadcast([tensors[spec.name].contiguous()], deadline)
            loaded.result(SECONDS)
        callback.continue_generation()
        callback.destroy_group(name)
    finally:
        group.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving()) for _ in range(2)]


def test_two_replicas_are_updated_twice_through_named_groups(settings: ClientSettings, engines: list[Server]) -> None:
    servers = {f"replica-{number}": Where(engine.url) for number, engine in enumerate(engines)}
    with following(settings, servers) as admission, RolloutCallback(settings, timeout=SECONDS) as callback:
        for round_, name in enumerate(("main", "other")):
            tensors = checkpoint(round_)
            send(callback, name, tensors, 2, f"rl@{round_}")
            for engine in engines:
                assert engine.holds(tensors) == []
                assert engine.state()["weight_version"] == f"rl@{round_}"
                assert engine.state()["groups"] == []
        assert admission.told == ["pause", "resume"] * 2
        with pytest.raises(LoadError, match=r"at 2 of 2 replicas: replica-0: .*main.* not initialized.* replica-1: "):
            callback.destroy_group("main")
        with pytest.raises(ConfigurationError, match="7 ranks"):
            callback.init_group("main", "127.0.0.1", 1, world_size=7).result(SECONDS)


def test_a_replica_that_is_gone_is_named(settings: ClientSettings, engines: list[Server]) -> None:
    servers = {"here": Where(engines[0].url), "gone": Where(f"http://127.0.0.1:{free_port()}")}
    with following(settings, servers), RolloutCallback(settings, timeout=SECONDS) as callback:
        with pytest.raises(LoadError, match=r"at 1 of 2 replicas: gone: POST .* http://"):
            callback.pause()
        engines[0].post("/abort_weight_update")


def test_nobody_follows_and_nobody_carries_it_out_later(settings: ClientSettings, engines: list[Server]) -> None:
    with RolloutCallback(settings) as callback:
        with pytest.raises(DeadlineExceeded, match="no rollout controller"):
            callback.pause(timeout=0.3)
        engines[0].calls()
        with following(settings, {"a": Where(engines[0].url)}) as admission:
            with pytest.raises(LoadError):
                callback.destroy_group("none", timeout=SECONDS)  # what came after it is carried out
            assert admission.told == []


def test_a_coordinator_that_is_gone_is_tried_until_the_deadline_and_named() -> None:
    where = ClientSettings(coordinator=Address("http", "127.0.0.1", free_port()), token=Secret("t"), timeouts=Timeouts(connect=1.0))
    with RolloutCallback(where) as callback:
        began = time.monotonic()
        future = callback.update_from_distributed("main", [], timeout=1.0)
        assert not future.done()  # the trainer goes on to its collective
        with pytest.raises(CoordinatorUnreachable, match=where.coordinator.url):
            future.result(SECONDS)
        assert time.monotonic() - began >= 1.0
        with pytest.raises(CoordinatorUnreachable):
            callback.pause(timeout=0.2)


def test_a_coordinator_that_comes_in_time_is_reached(engines: list[Server]) -> None:
    token = Secret("t" * 32)
    where = fast(Address("http", "127.0.0.1", free_port()), token)
    with RolloutCallback(where, timeout=SECONDS) as callback:
        future = callback.init_group("main", "127.0.0.1", 1, world_size=9)
        with (
            BackgroundServer(ServerSettings(port=where.coordinator.port, token=token, heartbeat=0.3, mounts=("rollouts",))),
            following(where, {"a": Where(engines[0].url)}),
            pytest.raises(ConfigurationError, match="9 ranks"),
        ):
            future.result(SECONDS)


def test_orders_that_are_not_answered_yet_fail_when_the_callback_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = fast(Address("http", *silent.getsockname()), Secret("t"))
        with RolloutCallback(where, timeout=SECONDS) as callback:
            future = callback.update_from_distributed("main", [])
            silent.settimeout(SECONDS)
            connection, _ = silent.accept()
        with connection, pytest.raises(Aborted, match="closed before its order"):
            future.result(SECONDS)


def test_a_wrong_token(settings: ClientSettings) -> None:
    with RolloutCallback(fast(settings.coordinator, Secret("wrong"))) as callback, pytest.raises(AuthenticationError):
        callback.pause(timeout=SECONDS)


async def test_an_order_that_comes_again_is_answered_again_and_done_once() -> None:
    """The coordinator is restarted after an order was carried out: the trainer repeats it, and nothing happens twice."""
    token = Secret("t" * 32)
    where = fast(Address("http", "127.0.0.1", free_port()), token)
    wish = ServerSettings(port=where.coordinator.port, token=token, heartbeat=0.3, mounts=("rollouts",))
    order = Order("the same", "pause", {}, SECONDS)
    done: list[str] = []

    class Servers(UpdateServers):
        async def carry_out(self, order: Order) -> str:
            done.append(order.id)
            return "paused"

    async with CommandFollower(where, Servers({"a": Where("http://a")})), coordinator_http(where) as http:
        for _ in range(2):
            server = BackgroundServer(wish)
            await asyncio.to_thread(server.start)
            try:
                for _ in range(2):
                    body = msgspec.json.encode(order)
                    answer = await request_until(http, where, "POST", "/v1/rollouts/orders", body, Deadline(SECONDS))
                    assert answer.json() == {"message": "paused"}
            finally:
                await asyncio.to_thread(server.stop)
    assert done == ["the same"]


async def test_an_order_is_answered_by_the_controller_that_follows_and_by_no_other_worker(settings: ClientSettings) -> None:
    """With the token a stolen engine followed the orders too, and told the trainer that they were done: nobody had."""
    order = Order("of the trainer", "pause", {}, SECONDS)
    began, go_on = asyncio.Event(), asyncio.Event()

    class Servers(UpdateServers):
        async def carry_out(self, order: Order) -> str:
            began.set()
            await go_on.wait()
            return "paused"

    async with coordinator_http(settings) as thief, coordinator_http(settings) as trainer:
        async with CommandFollower(settings, Servers({"a": Where("http://a")})):
            body = msgspec.json.encode(order)
            asked = asyncio.create_task(trainer.post("/v1/rollouts/orders", content=body, timeout=SECONDS))
            await asyncio.wait_for(began.wait(), SECONDS)
            for secret in (None, "guessed"):
                headers = {} if secret is None else {FOLLOWER_HEADER: secret}
                followed = await thief.get("/v1/rollouts/orders/events", headers=headers)
                assert followed.status_code == (400 if secret is None else 503)
                assert (await thief.get("/v1/rollouts/orders/1?epoch=x", headers=headers)).status_code == 403
                forged = await thief.post("/v1/rollouts/orders/1", content=b'{"epoch": "x", "message": "done"}', headers=headers)
                assert forged.status_code == 403
                deleted = await thief.post(
                    "/v1/rollouts/completions/acknowledge", content=b'{"epoch": "x", "upto": 9}', headers=headers
                )
                assert deleted.status_code == 403, "it could delete completions as well"
            assert not asked.done()
            go_on.set()
            assert (await asked).json() == {"message": "paused"}
        async with CommandFollower(settings, Servers({"a": Where("http://a")})):
            # The place is free for a controller that was restarted.
            again = msgspec.json.encode(msgspec.structs.replace(order, id="another"))
            assert (await trainer.post("/v1/rollouts/orders", content=again, timeout=SECONDS)).json() == {"message": "paused"}
