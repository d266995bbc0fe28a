"""Calls between the coordinator and agents over real sockets: order, errors, deadlines, and the quarantine that gets through."""

from __future__ import annotations

import queue
import threading
import time

import msgspec
import pytest
from tests.integration.server.service_support import SOON, Agent, engine_hello, joined, obey, trainer_hello

from weightsync.config import ClientSettings
from weightsync.errors import (
    Aborted,
    ConfigurationError,
    DeadlineExceeded,
    LoadError,
    PeerLost,
    ProtocolError,
)
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.messages import (
    Body,
    Commit,
    Move,
    Pause,
    Prepare,
    Publish,
    Published,
    Quarantine,
    Resume,
    Update,
)
from weightsync.server.client import Client

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

# Calls.


def test_errors_cross_with_their_kind(settings: ClientSettings) -> None:
    with joined(settings, engine_hello("a")) as agent, pytest.raises(ProtocolError, match="may not send"):
        agent.link.call(Publish(1), 5)


def test_a_quarantine_gets_through_while_a_move_runs(settings: ClientSettings) -> None:
    """The other rank of the replica fails while this one is in the middle, so nothing here depends on how fast anybody is."""
    moving, aborted = threading.Event(), threading.Event()
    ended_by_it = queue.SimpleQueue[bool]()  # which the move's thread tells after the quarantine was handled
    moves, moves_before = 0, -1  # a retry moves again, once the quarantine was handled

    def engine(body: Body, timeout: float) -> Body:
        nonlocal moves, moves_before
        if isinstance(body, Move):
            moves += 1
            moving.set()
            ended_by_it.put(aborted.wait(timeout))
            raise Aborted("the quarantine ended it")
        if isinstance(body, Quarantine) and not aborted.is_set():
            moves_before = moves
            aborted.set()
        return obey(body, timeout)

    def other(body: Body, timeout: float) -> Body:
        if isinstance(body, Move):
            moving.wait(timeout)
            raise LoadError("this rank cannot")
        return obey(body, timeout)

    first, second = (msgspec.structs.replace(engine_hello("a", f"rank-{rank}"), rank=rank, world_size=2) for rank in range(2))
    with joined(settings, first, engine) as agent, joined(settings, second, other), joined(settings, trainer_hello()) as trainer:
        result = trainer.link.call(Publish(1), 30)
        assert agent.wait_for(Quarantine)
        assert ended_by_it.get(timeout=30)
        assert moves_before == 1
        assert isinstance(result, Published)
        assert not result.result.ok
        assert "this rank cannot" in str(result.result.replicas[0].error)


def test_calls_come_one_at_a_time_and_in_order(settings: ClientSettings) -> None:
    running = threading.Lock()
    overlapped: list[Body] = []

    def engine(body: Body, timeout: float) -> Body:
        if not running.acquire(blocking=False):
            overlapped.append(body)
        else:
            running.release()
        return obey(body, timeout)

    with joined(settings, engine_hello("a"), engine) as agent, joined(settings, trainer_hello()) as trainer:
        trainer.link.call(Publish(1), 10)
        prepare, update = (agent.bodies.get(timeout=5) for _ in range(2))
    assert isinstance(prepare, Prepare)
    assert isinstance(update, Update), "a replica's only rank waits for nobody between pause and resume"
    assert (update.version.number, update.mode) == (1, "abort")
    assert not overlapped
    assert agent.bodies.empty()


def test_the_ranks_of_a_replica_wait_for_each_other(settings: ClientSettings) -> None:
    hellos = [msgspec.structs.replace(engine_hello("a"), rank=rank, world_size=2) for rank in range(2)]
    with joined(settings, hellos[0]) as one, joined(settings, hellos[1]) as other, joined(settings, trainer_hello()) as trainer:
        trainer.link.call(Publish(1), 10)
        for agent in (one, other):
            bodies = [agent.bodies.get(timeout=5) for _ in range(5)]
            assert [type(body) for body in bodies] == [Prepare, Pause, Move, Commit, Resume]
            assert Move(1) in bodies


def test_a_handler_that_raises_anything_fails_only_its_call(settings: ClientSettings) -> None:
    def engine(body: Body, timeout: float) -> Body:
        if isinstance(body, Update):
            raise ZeroDivisionError("in the loader")
        return obey(body, timeout)

    with joined(settings, engine_hello("a"), engine) as agent, joined(settings, trainer_hello()) as trainer:
        result = trainer.link.call(Publish(1), 10)
        assert isinstance(result, Published)
        assert "ZeroDivisionError: in the loader" in (result.result.error or "")
        assert agent.wait_for(Quarantine)
        assert agent.link.connected


def test_progress_is_thinned_out_and_the_newest_arrives(settings: ClientSettings) -> None:
    reported = threading.Event()
    links: list[CoordinatorConnection] = []

    def engine(body: Body, timeout: float) -> Body:
        if isinstance(body, Update):
            for nbytes in range(10_001):
                links[0].progress(min(nbytes, 16))
            reported.wait(0.5)
        return obey(body, timeout)

    with Client(settings) as client, client.events() as events, joined(settings, engine_hello("a"), engine) as agent:
        links.append(agent.link)
        with joined(settings, trainer_hello()) as trainer:
            trainer.link.call(Publish(1), 10)
        seen: list[int] = []
        for event in events:
            if type(event).__name__ == "ReplicaBytes":
                seen.append(event.nbytes)  # type: ignore[union-attr]
            if type(event).__name__ == "RoundEnded":
                break
    assert 1 <= len(seen) <= 20
    assert seen[-1] == 16


def test_a_call_has_a_deadline(settings: ClientSettings) -> None:
    with joined(settings, trainer_hello(rank=0, world_size=2)) as agent:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            agent.link.call(Publish(1), 0.4)
        assert time.monotonic() - started < 1.5
        with pytest.raises(ConfigurationError):
            agent.link.call(Publish(1), 0)


def test_close_ends_a_waiting_call_and_can_be_repeated(settings: ClientSettings) -> None:
    agent = Agent(settings, lambda: trainer_hello(rank=0, world_size=2))
    agent.link.connect()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            agent.link.call(Publish(1), 30)
        except (Aborted, PeerLost) as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    threading.Event().wait(0.2)
    agent.link.close()
    waiting.join(SOON)
    assert not waiting.is_alive()
    assert caught
    agent.link.close()
    with pytest.raises(Aborted):
        agent.link.call(Publish(2), 1)
    agent.link.progress(1)
    with pytest.raises(ConfigurationError, match="once"):
        agent.link.connect()
