"""What the protection costs: ``python -m tests.integration.measure_security`` prints the tables of docs/benchmarks/security.md."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from tests.integration.test_service_limits import FLOOD

import weightsync
from weightsync.deadline import Deadline
from weightsync.transports.host import this_host
from weightsync.transports.shelf import Shelf
from weightsync.transports.tcp import Tcp

MIB = 1 << 20


def key_cost(connections: int = 300) -> None:
    """A connection that proves itself, against a bare one."""
    shelf, key, here = Shelf(4096, "layout"), secrets.token_bytes(32), this_host()
    owner = Tcp().serve(shelf, key, here)
    proved, bare = [], []
    try:
        where = owner.offer.address.partition("/")[0].rpartition(":")
        for _ in range(connections):
            started = time.perf_counter()
            Tcp().connect(owner.offer, key, Deadline(10)).close()
            proved.append(time.perf_counter() - started)
            started = time.perf_counter()
            socket.create_connection((where[0], int(where[2])), timeout=10).close()
            bare.append(time.perf_counter() - started)
    finally:
        owner.close()
        shelf.close()
    print(f"connection: bare {1e3 * statistics.median(bare):.2f} ms, proved {1e3 * statistics.median(proved):.2f} ms; bytes: none")


@contextlib.contextmanager
def flood(port: int, processes: int) -> Iterator[None]:
    """Strangers that connect as fast as they can."""
    command = [sys.executable, "-c", FLOOD, "127.0.0.1", str(port), "600"]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(processes)]
    try:
        time.sleep(1.0)
        yield
    finally:
        for one in running:
            one.kill()
            one.wait(10)


@contextlib.contextmanager
def coordinator() -> Iterator[str]:
    """In a process of its own, as in real life."""
    command = [sys.executable, "-m", "weightsync", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            found = re.search(r"http://\S+", (child.stdout or sys.stdin).readline())
            yield found[0] if found else ""
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(20)


def rounds(nbytes: int, count: int, turns: int) -> None:
    """Rounds in turns: quiet, the coordinator flooded, the trainer's data socket flooded."""
    state = {"w": torch.randn(max(nbytes // 4, 4))}
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros_like(state["w"]), requires_grad=False))
    numbers = iter(range(1, 10_000))
    with coordinator() as url, weightsync.Trainer(state, url, transports=["tcp"]) as trainer:
        data = int(trainer._role.offers[0].address.partition("/")[0].rpartition(":")[2])
        adapter = weightsync.ModuleAdapter(model)
        with weightsync.Engine(adapter, "r", url, transports=["tcp"]):

            def some() -> list[float]:
                taken = []
                for _ in range(count):
                    started = time.perf_counter()
                    trainer.publish(next(numbers), timeout=60)
                    taken.append(time.perf_counter() - started)
                return taken

            some()
            seen: dict[str, list[float]] = {"quiet": [], "coordinator flooded": [], "data socket flooded": []}
            for _ in range(turns):
                seen["quiet"] += some()
                with flood(int(url.rpartition(":")[2]), 1):
                    seen["coordinator flooded"] += some()
                seen["quiet"] += some()
                with flood(data, 1):
                    seen["data socket flooded"] += some()
    quiet = statistics.median(seen["quiet"])
    for name, taken in seen.items():
        median = statistics.median(taken)
        ratio = f"{median / quiet:.2f} of quiet, least {min(taken):.4f}"
        print(f"{nbytes // MIB:4} MiB, {name:20}: {median:.4f} s ({len(taken)} rounds), {ratio}")


def main() -> None:
    """Print everything."""
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    key_cost()
    tasks: list[Callable[[], None]] = [lambda: rounds(0, 20, 5), lambda: rounds(256 * MIB, 4, 8)]
    for task in tasks:
        task()


if __name__ == "__main__":
    main()
