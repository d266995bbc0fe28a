"""What runs in the campaign's processes for updates from outside: a server of two engine ranks, and the trainer that updates it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
import uvicorn
from starlette.applications import Starlette
from tests.faults.mutants import planted
from tests.faults.parties import Gate, Sockets, lines, say
from tests.faults.weights import MANIFEST, NAMES, SHAPE, Weights, fill

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, WeightSyncError
from weightsync.tensors.digest import digest_box
from weightsync.transports.broadcast.process_groups import ProcessGroup, StoreRendezvous, init_custom_process_group
from weightsync_disaggregated import DisaggregatedRank, LocalRanks, Settings, WeightUpdates, weight_update_routes
from weightsync_disaggregated.buckets import buckets_of
from weightsync_disaggregated.clients.base import Bucket
from weightsync_disaggregated.clients.weightsync import WeightUpdateClient

__all__ = ["RANKS", "server", "trainer"]

RANKS = 2
_BUCKET_BYTES = MANIFEST.nbytes // 2
_TIMEOUT = 60.0
_HELD = 10.0
_BUCKET_SECONDS = 1.0


class _Lazy(Weights):
    """Weights whose loader takes nothing when it is told to."""

    lazy = False

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take this rank's rows, or nothing."""
        if not self.lazy:
            super().load(tensors)


class _Held:
    """Threads that were stopped at a point until the runner releases them."""

    def __init__(self) -> None:
        self._ends: dict[str, threading.Event] = {}
        self._answers = threading.Semaphore(0)

    def obey(self, order: dict[str, Any]) -> None:
        """Hold the calling thread at a point; or release those of all ranks, and wait until these have answered."""
        if "hold" in order:
            end = self._ends.setdefault(order["hold"], threading.Event())
            end.wait(_HELD)
        if "release" in order:
            while self._answers.acquire(blocking=False):
                pass  # of earlier orders
            self.release(order["release"])
            for _ in range(RANKS):
                self._answers.acquire(timeout=_HELD)

    def release(self, point: str) -> None:
        """Let go of whoever is, or comes to be, held there."""
        self._ends.setdefault(point, threading.Event()).set()
        self._ends.pop(point)

    def answered(self) -> None:
        """A rank answers."""
        self._answers.release()


def server(sockets: Sockets, config: dict[str, Any]) -> None:
    """Serve updates until the runner closes its end."""
    torch.set_num_threads(1)
    commands, gate, requests = sockets
    weights = [_Lazy(rank, RANKS) for rank in range(RANKS)]
    held = _Held()
    inner = Gate(gate, held.obey)

    def reach(name: str) -> None:
        inner(name)
        if name == "rank.answer":
            held.answered()

    failpoints.install(reach)
    ranks = LocalRanks(*(DisaggregatedRank(one, rank=rank) for rank, one in enumerate(weights)))
    limits = Settings(bucket_timeout=_BUCKET_SECONDS, init_timeout=5.0, update_timeout=10.0, leave_timeout=1.0)
    app = Starlette(routes=weight_update_routes(WeightUpdates(ranks, limits), None))
    listener = socket.create_server(("127.0.0.1", config["port"]))
    http = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False, timeout_graceful_shutdown=1))
    serving = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, name="http", daemon=True)

    def serve_requests() -> None:
        try:
            for count, _ in enumerate(lines(requests)):
                say(requests, weights[count % RANKS].answer())
        except OSError:
            return  # the runner closed its end

    with planted(config["bug"]):
        serving.start()
        threading.Thread(target=serve_requests, name="requests", daemon=True).start()
        say(commands, {"ready": True})
        for command in lines(commands):
            if command["do"] == "release":
                held.release(command["point"])
            for one in weights:
                one.lazy = command.get("lazy", one.lazy)
            say(commands, {"done": True})
        http.should_exit = True
        serving.join(5.0)
        ranks.close()


def _tensors(number: int) -> list[torch.Tensor]:
    made = [torch.empty(SHAPE, dtype=torch.int32) for _ in NAMES]
    fill(made, 0, number)
    return made


def _bytes_of(number: int, names: list[str]) -> torch.Tensor:
    tensors = _tensors(number)
    return torch.cat([tensors[NAMES.index(name)].reshape(-1).view(torch.uint8) for name in names])


def _update(url: str, number: int, timeout: float) -> None:
    """The whole update, as ``weightsync push`` does it."""
    deadline, tensors = Deadline(timeout), _tensors(number)
    digests = {name: f"{digest_box(one, one.shape, [0, 0]):016x}" for name, one in zip(NAMES, tensors, strict=True)}
    with WeightUpdateClient(url, group=f"update-{number}", backend="gloo", ranks=RANKS, address="127.0.0.1") as client:
        client.check(MANIFEST, str(number), deadline)
        client.join(deadline)
        client.begin(str(number), None, deadline)
        buckets = buckets_of(MANIFEST, _BUCKET_BYTES)
        for count, specs in enumerate(buckets, 1):
            bucket = Bucket(specs, _bytes_of(number, [spec.name for spec in specs]))
            client.update(bucket, count == len(buckets), deadline)
        client.commit(digests, deadline)


def _joined(url: str, name: str) -> ProcessGroup:
    deadline = Deadline(_TIMEOUT)
    rendezvous = StoreRendezvous("127.0.0.1", RANKS + 1, deadline)
    body = {
        "master_address": "127.0.0.1", "master_port": rendezvous.port, "rank_offset": 1, "world_size": RANKS + 1,
        "group_name": name, "backend": "gloo",
    }  # fmt: skip
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(
            httpx.post, f"{url}/init_weights_update_group", json=body, timeout=_TIMEOUT, trust_env=False
        )  # fmt: skip
        group = init_custom_process_group("gloo", 0, RANKS + 1, name, deadline, rendezvous=rendezvous)
        asked.result(_TIMEOUT).raise_for_status()
    return group


def trainer(sockets: Sockets, config: dict[str, Any]) -> None:
    """Update, join, or broadcast, as it is told; one command at a time."""
    torch.set_num_threads(1)
    commands, _, _ = sockets
    groups: dict[str, ProcessGroup] = {}
    say(commands, {"ready": True})
    for command in lines(commands):
        started, error = time.monotonic(), None
        try:
            match command["do"]:
                case "update":
                    _update(config["url"], command["number"], command["timeout"])
                case "join":
                    groups[command["group"]] = _joined(config["url"], command["group"])
                case "broadcast":
                    sent = _bytes_of(command["number"], command["names"])
                    groups[command["group"]].broadcast([sent], Deadline(5.0))
                case "leave":
                    groups.pop(command["group"]).close()
        except (WeightSyncError, httpx.HTTPError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            if isinstance(failure, DeadlineExceeded):
                groups.pop(command.get("group", ""), None)
        say(commands, {"error": error, "seconds": time.monotonic() - started})
    for group in groups.values():
        group.close()
