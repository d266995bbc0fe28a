"""Holds process groups of their own (gloo) to their contract where the other side is late, silent, gone, or no store at all."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, PeerLost, TransportUnavailable
from weightsync.transports.broadcast import process_groups
from weightsync.transports.broadcast.process_groups import ProcessGroup, StoreRendezvous, init_custom_process_group

SECONDS = 15.0

pytestmark = pytest.mark.usefixtures("first_gloo_group", "no_leaks")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def joined(name: str, port: int, seconds: float = SECONDS) -> ProcessGroup:
    return init_custom_process_group("gloo", 1, 2, name, Deadline(seconds), address="127.0.0.1", port=port)


def pair_of(name: str) -> tuple[StoreRendezvous, ProcessGroup, ProcessGroup]:
    deadline = Deadline(SECONDS)
    rendezvous = StoreRendezvous("127.0.0.1", 2, deadline)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(joined, name, rendezvous.port)
        mine = init_custom_process_group("gloo", 0, 2, name, deadline, rendezvous=rendezvous)
        return rendezvous, mine, other.result(SECONDS)


@contextmanager
def pair(name: str) -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    rendezvous, mine, theirs = pair_of(name)
    with closing(mine), closing(theirs), closing(rendezvous):
        yield mine, theirs


def test_no_rendezvous_waits_for_a_name_server() -> None:
    """Torch asks for the name of each peer of a store. Some networks drop part of so many questions, which costs 5 s each."""
    deadline = Deadline(5)
    for _ in range(40):
        StoreRendezvous("127.0.0.1", 2, deadline).close()
    deadline.remaining("opening 40 of them")


def test_bytes_that_arrive_after_a_group_was_closed_are_an_error() -> None:
    """Gloo cannot abort: the broadcast itself succeeds."""
    with pair("late") as (sender, receiver), ThreadPoolExecutor(1) as pool:
        memory = torch.zeros(4)
        receiving = pool.submit(receiver.broadcast, [memory], Deadline(SECONDS))
        while not receiver._lock.locked():
            assert not receiving.done()
        receiver.close()
        sender.broadcast([torch.ones(4)], Deadline(SECONDS))
        with pytest.raises(PeerLost, match="destroyed in the middle"):
            receiving.result(SECONDS)


def descriptors() -> set[str]:
    return {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)}


@pytest.mark.parametrize("end", ["closed", "closed while it runs", "passed its deadline", "closed before it is complete"])
def test_a_group_that_ended_holds_no_descriptor_whoever_refers_to_it(end: str) -> None:
    gc.collect()
    gc.disable()
    before = descriptors()
    errors: list[BaseException | None] = []
    try:
        if end == "closed before it is complete":
            rendezvous = StoreRendezvous("127.0.0.1", 2, Deadline(SECONDS))
            ending = threading.Timer(0.3, rendezvous.close)
            ending.start()
            with pytest.raises(PeerLost) as ended:
                init_custom_process_group("gloo", 0, 2, end, Deadline(SECONDS), rendezvous=rendezvous)
            ending.join(SECONDS)
            errors.append(ended.value)
            groups: list[ProcessGroup] = []
        else:
            rendezvous, *groups = pair_of(end)
        if end == "passed its deadline":
            with pytest.raises(DeadlineExceeded) as passed:
                groups[1].broadcast([torch.zeros(4)], Deadline(0.3))
            errors.append(passed.value)
        with ThreadPoolExecutor(1) as pool:
            if end == "closed while it runs":
                receiving = pool.submit(groups[1].broadcast, [torch.zeros(4)], Deadline(SECONDS))
                while not groups[1]._lock.locked():
                    threading.Event().wait(0.001)
            for group in groups:
                group.close()
            rendezvous.close()
            if end == "closed while it runs":
                errors.append(receiving.exception(SECONDS))
                assert isinstance(errors[-1], PeerLost)
        assert descriptors() <= before
    finally:
        gc.enable()


def test_a_rendezvous_that_opens_later_is_met() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(joined, "later", port)
        assert not threading.Event().wait(0.3)  # nobody listens meanwhile
        rendezvous = StoreRendezvous("127.0.0.1", 2, Deadline(SECONDS), port)
        with closing(init_custom_process_group("gloo", 0, 2, "later", Deadline(SECONDS), rendezvous=rendezvous)):
            other.result(SECONDS).close()


def test_a_listener_that_says_nothing_holds_nobody_beyond_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            joined("silent", listener.getsockname()[1], 1.0)
        assert time.monotonic() - started < 3.0
        listener.settimeout(SECONDS)
        listener.accept()[0].close()  # which ends the thread that was left behind


def test_attempts_that_wait_for_silent_listeners_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "_joining", threading.Semaphore(0))
    with pytest.raises(TransportUnavailable, match="earlier attempts"):
        joined("many", free_port())
