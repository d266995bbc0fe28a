"""``weightsync relay`` as a process that kills or interrupts itself at a fault point. For test_relay_points.py."""

from __future__ import annotations

import os
import signal
import threading

import weightsync.server.server  # noqa: F401 - before the fork: it takes seconds
import weightsync_relay.relay  # noqa: F401 - the same
from weightsync import failpoints
from weightsync_relay.commands import relay

PUBLISHED = "published, and from now on"


def _end_with(test: int) -> None:
    os.read(test, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def run(descriptors: list[int], arguments: list[str]) -> None:
    """What a process does that a fork server made: the command itself, until it is ended or gets to ``point``.

    With ``begin`` ``once`` that counts only after its first publication, and it says so.
    """
    where, key, run_id, url, token, act, point, begin = arguments
    for number in (1, 2):
        os.dup2(descriptors[0], number)
    os.close(descriptors[0])
    threading.Thread(target=_end_with, args=(descriptors[1],), daemon=True).start()
    os.environ["WEIGHTSYNC_TOKEN"] = token
    armed = begin == "armed"

    def gate(name: str) -> None:
        nonlocal armed
        if armed and name == point:
            os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGTERM)
        if name == "relay.published" and not armed:
            armed = True
            print(PUBLISHED, flush=True)

    failpoints.install(gate)
    relay(store=where, run=run_id, key=key, coordinator=url, interval=0.1, deltas=True)
