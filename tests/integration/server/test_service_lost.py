"""A coordinator or an agent that dies, stops answering or is restarted: what becomes of calls, and coming back afterwards."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.integration.server.service_support import (
    SOON,
    Agent,
    RawAgent,
    engine_hello,
    fast,
    free_port,
    joined,
    obey,
    trainer_hello,
)
from tests.processes import ChildProcess

from weightsync.config import Address, ClientSettings, Secret, ServerSettings, Timeouts
from weightsync.coordinator.events import Left
from weightsync.errors import (
    Aborted,
    CoordinatorUnreachable,
    DeadlineExceeded,
    PeerLost,
)
from weightsync.protocol.messages import (
    Body,
    Publish,
    Published,
    Quarantine,
    Update,
    Welcome,
)
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")


@contextmanager
def process(port: int = 0) -> Iterator[tuple[ChildProcess, Address]]:
    """A coordinator in a separate process, to be killed or stopped."""
    with ChildProcess(
        "-m", "weightsync", "serve", "--port", port, "--run", "run", environment={"WEIGHTSYNC_HEARTBEAT": "0.3"}
    ) as child:
        address = re.search(r"http://\S+", child.line())
        assert address
        yield child, Address.parse(address.group())


# Losing each other.


def test_nobody_there_names_the_address(runtime: None) -> None:
    address = Address("http", "127.0.0.1", free_port())
    agent = Agent(ClientSettings(coordinator=address, timeouts=Timeouts(connect=0.5)), engine_hello)
    started = time.monotonic()
    with pytest.raises(CoordinatorUnreachable, match=re.escape(address.url)) as caught:
        agent.link.connect()
    assert time.monotonic() - started < 2
    assert "weightsync serve" in str(caught.value)
    assert "refused" in str(caught.value)
    assert agent.hellos > 1, "it was tried again until the deadline"


def test_a_listener_that_never_answers_is_given_up(runtime: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("http", "127.0.0.1", silent.getsockname()[1])
        agent = Agent(ClientSettings(coordinator=address, timeouts=Timeouts(connect=0.5)), engine_hello)
        started = time.monotonic()
        with pytest.raises(CoordinatorUnreachable, match=re.escape(address.url)):
            agent.link.connect()
        assert time.monotonic() - started < 3


def test_an_agent_may_come_before_its_coordinator(runtime: None) -> None:
    port = free_port()
    token = Secret("given-to-both")
    agent = Agent(fast(Address("http", "127.0.0.1", port), token), engine_hello)
    with agent.link:
        connecting = threading.Thread(target=agent.link.connect)
        connecting.start()
        threading.Event().wait(0.3)
        with BackgroundServer(ServerSettings(port=port, token=token)):
            connecting.join(5)
            assert agent.link.connected


def test_a_killed_coordinator_fails_a_pending_call_at_once(runtime: None) -> None:
    with process() as (child, address), joined(fast(address), trainer_hello(rank=0, world_size=2)) as agent:
        failed: list[float] = []

        def wait() -> None:
            with pytest.raises(PeerLost, match=re.escape(address.url)):
                agent.link.call(Publish(1), 30)
            failed.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        threading.Event().wait(0.3)
        killed = time.monotonic()
        child.kill()
        waiting.join(5)
        assert failed
        assert failed[0] - killed < SOON
        with pytest.raises(DeadlineExceeded, match="was not sent"):
            agent.link.call(Publish(1), 0.5)


def test_a_coordinator_that_stops_answering_is_noticed_and_found_again(runtime: None) -> None:
    with process() as (child, address), joined(fast(address), engine_hello()) as agent:
        agent.welcomes.get(timeout=5)
        child.send_signal(signal.SIGSTOP)
        assert "ping" in agent.losses.get(timeout=4)
        assert not agent.link.connected
        child.send_signal(signal.SIGCONT)
        agent.welcomes.get(timeout=5)
        assert agent.link.connected


def test_a_link_comes_back_after_a_restart_with_a_fresh_hello(runtime: None) -> None:
    port = free_port()
    published = [3]
    agent: Agent | None = None
    with BackgroundServer(ServerSettings(port=port, run="run")) as first:  # each with its own token
        agent = Agent(fast(first.address), lambda: trainer_hello(published=published[0]))
        agent.link.connect()
        agent.welcomes.get(timeout=5)
        published[0] = 8
    with agent.link:
        assert agent.losses.get(timeout=5)
        with BackgroundServer(ServerSettings(port=port, run="run")) as second, Client(fast(second.address)) as client:
            agent.welcomes.get(timeout=5)
            assert client.status().last == 8
            answer = agent.link.call(Publish(9), 10)
            assert isinstance(answer, Published)


def test_a_call_waits_for_the_connection_to_come_back(runtime: None) -> None:
    port, token = free_port(), Secret("given-to-both")
    answers: list[Body] = []
    with BackgroundServer(ServerSettings(port=port, token=token)) as first:
        agent = Agent(fast(first.address, token), trainer_hello)
        agent.link.connect()
    with agent.link:
        agent.losses.get(timeout=5)
        calling = threading.Thread(target=lambda: answers.append(agent.link.call(Publish(1), 15)))
        calling.start()
        with BackgroundServer(ServerSettings(port=port, token=token)):
            calling.join(15)
            assert isinstance(answers[0], Published)


def test_a_clean_shutdown_tells_agents_why(server: BackgroundServer, settings: ClientSettings) -> None:
    with joined(settings, engine_hello()) as agent:
        server.stop()
        assert "shutting down" in agent.losses.get(timeout=5)


def test_a_shutdown_in_the_middle_of_an_update_quarantines_first(server: BackgroundServer, settings: ClientSettings) -> None:
    moving, aborted = threading.Event(), threading.Event()

    def engine(body: Body, timeout: float) -> Body:
        if isinstance(body, Update):
            moving.set()
            aborted.wait(timeout)
        if isinstance(body, Quarantine):
            aborted.set()
        return obey(body, timeout)

    caught: list[BaseException] = []

    def publish() -> None:
        try:
            trainer.link.call(Publish(1), 20)
        except Aborted as error:
            caught.append(error)

    with joined(settings, engine_hello("a"), engine) as agent, joined(settings, trainer_hello()) as trainer:
        publishing = threading.Thread(target=publish)
        publishing.start()
        assert moving.wait(5)
        server.stop()
        assert agent.wait_for(Quarantine, 1)
        publishing.join(5)
        assert len(caught) == 1, "the trainer learns that the publication was given up, not just that a connection broke"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_process_in_order(runtime: None, number: signal.Signals) -> None:
    with process() as (child, address), joined(fast(address), engine_hello()) as agent:
        child.send_signal(number)
        assert "shutting down" in agent.losses.get(timeout=5)
        assert "stopped" in child.output(10)


def test_an_agent_that_answers_no_ping_is_lost(server: BackgroundServer, settings: ClientSettings) -> None:
    with Client(settings) as client, client.events() as events, RawAgent(server.address, server.token) as raw:
        raw.say(engine_hello("mute"))
        assert isinstance(raw.frame(), Welcome)
        started = time.monotonic()
        left = next(event for event in events if isinstance(event, Left))
        assert left.member == "mute/0"
        assert time.monotonic() - started < 2


def test_an_agent_whose_process_died_is_lost_at_once(server: BackgroundServer, settings: ClientSettings) -> None:
    with Client(settings) as client, client.events() as events:
        with RawAgent(server.address, server.token) as raw:
            raw.say(engine_hello("dead"))
            assert isinstance(raw.frame(), Welcome)
        started = time.monotonic()  # its socket closed without a word
        assert next(event for event in events if isinstance(event, Left)).member == "dead/0"
        assert time.monotonic() - started < SOON
