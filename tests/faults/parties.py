"""What runs in the campaign's processes: a coordinator, trainer ranks, engine ranks. Each obeys lines on a socket of the runner."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from tests.faults.fork_mutants import MUTANTS
from tests.faults.forked import Closable, fork
from tests.faults.network import enter
from tests.faults.source_mutants import SOURCE_MUTANTS
from tests.faults.weights import NAMES, SHAPE, Weights, fill
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from weightsync import failpoints
from weightsync.arrays import Bytes
from weightsync.config import Secret, ServerSettings
from weightsync.deadline import Deadline
from weightsync.engine.engine import Engine
from weightsync.engine.fill.direct import StagedChanges
from weightsync.engine.session import EngineSession
from weightsync.errors import WeightSyncError
from weightsync.protocol.messages import Quarantine
from weightsync.server.server import serve
from weightsync.tensors.changes import HostChanges
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.base import Transport
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.tcp.transport import Tcp

__all__ = ["LISTS", "STAGED", "Gate", "Sockets", "coordinator", "engine", "lines", "run", "say", "trainer"]

Sockets = tuple[socket.socket, socket.socket, socket.socket]
"""Commands, failpoints, requests: this process's ends."""

LISTS, STAGED = "lists", "staged"
"""Bits that flip in lists of changes: where a trainer rank publishes them, and where an engine rank has staged them."""
_TIMEOUT = 3600.0  # seconds without a word from the runner after which a party ends; if the runner dies it hears so at once
_ROW = 4 * SHAPE[1]


def run(target: Callable[[Sockets, dict[str, Any]], None], sockets: Sockets, config: dict[str, Any]) -> None:
    """Be the party ``target``, with the bug that ``config`` names, if it names one."""
    mutant = config.get("mutant")
    with (MUTANTS | SOURCE_MUTANTS)[mutant]() if mutant else nullcontext():
        target(sockets, config)


def lines(sock: socket.socket) -> Iterator[dict[str, Any]]:
    """Messages of the runner, until it closes its end."""
    sock.settimeout(_TIMEOUT)
    with sock.makefile("rb") as stream:
        try:
            for line in stream:
                yield msgspec.json.decode(line)
        except TimeoutError:
            return


def say(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send a message to the runner."""
    sock.sendall(msgspec.json.encode(message) + b"\n")


class Gate:
    """Tells the runner where this process is, and does what it answers: go on, or an order first."""

    def __init__(self, sock: socket.socket, orders: Callable[[dict[str, Any]], None] = lambda order: None) -> None:
        logging.disable(logging.WARNING)  # lost connections are what this is about
        sock.settimeout(_TIMEOUT)
        self._sock, self._stream = sock, sock.makefile("rb")
        self._orders = orders
        self.made: Closable | None = None
        """What a forked child inherits."""
        self.sockets: tuple[int, ...] = ()
        """The runner's, which a child must not keep."""
        self._turn = threading.Lock()

    def __call__(self, name: str) -> None:
        """This process is at point ``name``."""
        with self._turn:
            try:
                say(self._sock, {"point": name})
                line = self._stream.readline()
            except OSError:
                line = b""
            if not line:
                os._exit(3)  # the runner is gone
            order = msgspec.json.decode(line)
            if "fork" in order:
                self._fork(order["fork"])
                return
        if order:
            self._orders(order)  # other threads go on meanwhile

    def _fork(self, kind: str) -> None:
        child = fork(kind, self.made, self.sockets)
        say(self._sock, {"forked": child})
        self._stream.readline()


def coordinator(sockets: Sockets, config: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    commands, gate, _ = sockets
    failpoints.install(Gate(gate))
    settings = ServerSettings.load(
        {},
        host=config["host"],
        port=config["port"],
        token=Secret(config["token"]),
        operator_token=Secret(config["operator"]),
        run="faults",
        require="all",
        shutdown_seconds=1.0,
        **config["settings"],
    )
    serve(settings, lambda address, token, control: say(commands, {"ready": True}))


def _flip(memory: Bytes, seed: int) -> None:
    """Flip a bit."""
    random = np.random.default_rng(seed)
    memory[random.integers(len(memory))] ^= np.uint8(1 << int(random.integers(8)))


def _corrupt(region: PublishedRegion, world: int, kind: str, seed: int) -> None:
    """Change bytes that were already digested: what memory, a wire or a wrong copy could do."""
    random = np.random.default_rng(seed)
    rows = region.payload.reshape(-1)[: len(NAMES) * SHAPE[0] // world * _ROW].reshape(-1, _ROW)  # lists of changes are behind
    first, second, third = (int(row) for row in random.choice(len(rows), 3, replace=False))
    if kind == "flip":
        rows[first, random.integers(_ROW)] ^= np.uint8(1 << int(random.integers(8)))
    elif kind == "swap":
        rows[[first, second]] = rows[[second, first]]
    elif kind == "drop":
        rows[first] = 0
    elif kind == "repeat":
        rows[first] = rows[second]
    elif kind == "reorder":
        rows[[first, second, third]] = rows[[second, third, first]]
    else:
        raise ValueError(f"no corruption is called {kind}")


def trainer(sockets: Sockets, config: dict[str, Any]) -> None:
    """One of two ranks, each with half of the rows of every tensor."""
    torch.set_num_threads(1)
    commands, gate, _ = sockets
    rank, world = config["rank"], config["world"]
    if config["store"] is not None:
        os.environ |= {"WEIGHTSYNC_STORE": config["store"], "WEIGHTSYNC_STORE_KEEP": "2"}
    # DTensors need a mesh, and nothing here communicates: a group that only pretends lets one rank restart without the others.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    rows = SHAPE[0] // world
    local = [torch.zeros(rows, SHAPE[1], dtype=torch.int32) for _ in NAMES]
    transport: Transport | str = config["transport"]
    if "tcp" in config:  # known to others by the address of a relay, and encrypted: the way between hosts
        transport = Tcp(**config["tcp"], encrypt=True)
    placements = [ShardPlacement(0)]
    state = {name: DTensor.from_local(part, mesh, placements, run_check=False) for name, part in zip(NAMES, local, strict=True)}

    def join() -> Trainer:
        url, token = config["coordinator"], config["token"]
        deltas = config["every"] > 1
        return Trainer(state, url, token=token, rank=rank, world_size=world, transports=[transport], deltas=deltas)

    def obey(order: dict[str, Any]) -> None:
        role = made._role
        if not (isinstance(role, TrainerRole) and isinstance(role.region, PublishedRegion)):
            return
        if order["corrupt"] != LISTS:
            _corrupt(role.region, world, order["corrupt"], order["seed"])
        elif role.changes is not None:
            [listed] = role.changes.changed
            _flip(role.region.payload[listed.payload : listed.payload + 4 * listed.units], order["seed"])

    made = join()
    gated = Gate(gate, obey)
    gated.made, gated.sockets = made, tuple(sock.fileno() for sock in sockets)
    failpoints.install(gated)
    say(commands, {"ready": True})
    for command in lines(commands):
        match command.get("do"):
            case "leave":
                made.close()
            case "join":
                gated.made = made = join()
            case _:
                fill(local, rank * rows, command["number"], config["every"])
                say(commands, _published(made, command))
                continue
        say(commands, {"done": True})
    made.close()


def _published(made: Trainer, command: dict[str, Any]) -> dict[str, Any]:
    """Publish what ``command`` says; how it went."""
    started = time.monotonic()
    answer: dict[str, Any] = {"error": None, "digest": None}
    try:
        answer["digest"] = made.publish(command["number"], timeout=command["timeout"]).version.digest
    except WeightSyncError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return {**answer, "seconds": time.monotonic() - started}


def engine(sockets: Sockets, config: dict[str, Any]) -> None:
    """One rank of a replica, which answers requests throughout.

    On command it ``leave``s, forgetting its weights, and ``join``s; is ``taken`` and changed by another front; or ``quarantined``.
    """
    torch.set_num_threads(1)
    if config["namespace"] is not None:
        enter(config["namespace"])
    commands, gate, requests = sockets
    weights = Weights(config["rank"], config["world"], config["every"])

    def obey(order: dict[str, Any]) -> None:
        staged = None if joined is None else joined._role._staged
        if order["corrupt"] == STAGED and isinstance(staged, StagedChanges):
            for changes in staged._changes:
                assert isinstance(changes, HostChanges)
                _flip(changes._payload[-1:].view(np.uint8), order["seed"])  # a value: a word that is listed twice is not undone
            return
        served = None if joined is None else joined._served
        if served is not None and isinstance(served.region, PublishedRegion):
            _corrupt(served.region, config["world"], order["corrupt"], order["seed"])

    joined: Engine | None = None
    gated = Gate(gate, obey)
    gated.sockets = tuple(sock.fileno() for sock in sockets)
    failpoints.install(gated)

    def serve_requests() -> None:
        try:
            for _ in lines(requests):
                say(requests, weights.answer())
        except OSError:
            return  # the runner closed its end

    threading.Thread(target=serve_requests, name="requests", daemon=True).start()

    def join() -> Engine:
        return Engine(
            weights,
            config["replica"],
            config["coordinator"],
            token=config["token"],
            rank=config["rank"],
            world_size=config["world"],
            transports=[config["transport"], *([] if config["store"] is None else ["store"])],
            delivery=config["delivery"],
            bucket_bytes=1 << 18,
            serve_weights=config["serve"],
        )

    gated.made = joined = join()
    say(commands, {"ready": True})
    for command in lines(commands):
        if joined is not None and command["do"] == "leave":
            weights.pause("abort", 10.0)
            joined.close()
            joined = None
            weights.forget()
        elif joined is not None and command["do"] == "taken":
            _take(weights)
        elif joined is not None and command["do"] == "quarantined":
            joined._role.handle(Quarantine("a test says so"), 10.0)
        elif joined is None and command["do"] == "join":
            gated.made = joined = join()
        say(commands, {"done": True})
    if joined is not None:
        joined.close()


def _take(weights: Weights) -> None:
    """Another front of the same engine changes half of what it holds, and leaves it paused."""
    front = EngineSession(weights, "another front")
    with front.turn(front.receive("an update from outside"), Deadline(10.0)):
        front.pause("abort", 10.0)
        with front.writing():
            weights.forget(len(NAMES) // 2)
