"""Whole rounds between real processes, with the floor measured in the same run.

A case is named ``transport/delivery/tensors``. Trainer ranks hold FSDP shards (DTensors), engine ranks hold tensor-parallel
halves. All bits change before every round. Two times are measured: from pause to resume (pause, move, verify, commit), while the
engine does not serve, and the whole ``Trainer.publish`` call on the slowest rank. The floor is the time of plain code with the
same tensors and the same number of concurrent processes:

* Shared memory, direct: one copy of every shard from the published region to the parameter. For ``publish``, also one copy from
  the trainer to the published region.
* Shared memory, streamed: the same, but every engine rank copies the whole model, and its loader copies its part once more.
* TCP: the same tensors through one plain loopback socket for each pair of ranks, to memory of the same size.
* TCP, encrypted: the same, then one AES-256-GCM encryption of these bytes at every trainer rank, and one decryption at every
  engine rank, in pieces of 256 KiB.

Each result also has the range of the rounds' ratios, the share of a round that an engine rank waited for a CPU, and the ratio of
CPU times, which other programs affect little. Together they distinguish a slower program from a busier machine.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from weightsync.config import ServerSettings
from weightsync.errors import RoundFailed
from weightsync.server.server import BackgroundServer
from weightsync_bench.compute import Case
from weightsync_bench.peer import Peer, together

_RANKS = 2

TRANSFER_CASES = (
    *(
        f"{transport}/{delivery}/{tensors}"
        for tensors in (300, 20000)
        for transport in ("shared_memory", "tcp")
        for delivery in ("direct", "streamed")
    ),
    "tcp-encrypted/direct/300",
)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _copy_floor(trainers: Sequence[Peer], engines: Sequence[Peer], streamed: bool) -> tuple[float, float]:
    """Measure the seconds of the whole floor, and of its part while the engine does not serve."""
    place = max(together(trainers, do="copy"))
    take = max(together(engines, do="copy"))
    # Streamed: each engine rank copies the whole model, which is its part times the number of ranks, and then loads its part.
    paused = take * (len(engines) + 1 if streamed else 1)
    return place + paused, paused


def _socket_floor(trainers: Sequence[Peer], engines: Sequence[Peer], streamed: bool) -> tuple[float, float]:
    total = 0.0
    for shift in range(len(engines) if streamed else 1):  # streamed: every engine rank receives every trainer rank's bytes
        turned = [engines[(index + shift) % len(engines)] for index in range(len(engines))]
        ports = [engine.ask(do="listen") for engine in turned]
        for engine in turned:
            engine.tell(do="receive")
        for trainer, port in zip(trainers, ports, strict=True):
            trainer.tell(do="send", port=port)
        sent = [trainer.hear() for trainer in trainers]
        total += max([*sent, *(engine.hear() for engine in turned)])
    return total, total


def _encrypted_floor(trainers: Sequence[Peer], engines: Sequence[Peer], streamed: bool) -> tuple[float, float]:
    total = _socket_floor(trainers, engines, streamed)[0] + max(together(trainers, do="seal")) + max(together(engines, do="open"))
    return total, total


def _peers(config: dict[str, Any], encrypted: bool, owned: ExitStack) -> tuple[list[Peer], list[Peer]]:
    environment = {"OMP_NUM_THREADS": "1", "WEIGHTSYNC_DATA_ENCRYPTION": "on" if encrypted else "off"}

    def start(role: str) -> list[Peer]:
        return [
            owned.enter_context(Peer("weightsync_bench.rank", {**config, "role": role, "rank": rank, "world": _RANKS}, environment))
            for rank in range(_RANKS)
        ]

    trainers, engines = start("trainer"), start("engine")
    for peer in (*trainers, *engines):
        peer.hear(timeout=180)
    return trainers, engines


def run_transfer_case(name: str, size: int, rounds: int, note: Callable[[str], None]) -> Case:
    """Run one case of :data:`TRANSFER_CASES`.

    Args:
        name: Name of the case.
        size: Approximate bytes of the model.
        rounds: Measured rounds, after a first one for setup.
        note: Called with progress messages.

    Raises:
        RoundFailed: A round failed or was not verified.
    """
    way, delivery, tensors = name.split("/")
    transport, _, encrypted = way.partition("-")
    streamed, mapped = delivery == "streamed", transport == "shared_memory"
    with ExitStack() as owned:
        server = owned.enter_context(BackgroundServer(ServerSettings.load(port=0, state_dir="off")))
        config = {
            "coordinator": server.url, "token": server.token, "rendezvous": f"tcp://127.0.0.1:{_free_port()}",
            "transport": transport, "delivery": delivery, "size": size, "tensors": int(tensors),
        }  # fmt: skip
        note(f"{name}: starting {2 * _RANKS} processes")
        trainers, engines = _peers(config, bool(encrypted), owned)
        measure = _copy_floor if mapped else _encrypted_floor if encrypted else _socket_floor
        measured = list(_rounds(trainers, engines, rounds, streamed, measure, lambda text: note(f"{name}: {text}")))
    results = [measurement.result for measurement in measured]
    seconds = statistics.median(measurement.paused for measurement in measured)
    floor_seconds = statistics.median(measurement.floor_paused for measurement in measured)
    publish_seconds = statistics.median(measurement.seconds for measurement in measured)
    ratios = [measurement.paused / measurement.floor_paused for measurement in measured]
    phases = {phase: statistics.median(row[phase] for row in map(_phases, results)) for phase in _phases(results[0])}
    return Case(
        name=name,
        bytes=results[0]["nbytes"],
        seconds=seconds,
        floor="plain copies of the same tensors"
        if mapped
        else "bare loopback sockets, and one encryption and decryption"
        if encrypted
        else "bare loopback sockets",
        floor_seconds=floor_seconds,
        ratio=seconds / floor_seconds,
        goal=None if streamed else 1.6 if int(tensors) > 300 else 1.3 if mapped or encrypted else 1.5,
        publish_seconds=publish_seconds,
        publish_ratio=publish_seconds / statistics.median(measurement.floor_whole for measurement in measured),
        phases=phases,
        rounds=rounds,
        ratio_lowest=min(ratios),
        ratio_highest=max(ratios),
        processor_ratio=None
        if streamed
        else statistics.median(measurement.ran / measurement.floor_ran for measurement in measured),
        waited_share=statistics.median(measurement.waited / measurement.paused for measurement in measured),
    )


def _phases(result: dict[str, Any]) -> dict[str, float]:
    return {**result["phases"], **result["replicas"][0]["phases"]}


class _Round(NamedTuple):
    """Times of one round and of the floor before it, in seconds. ``ran`` and ``waited`` are the engine ranks'."""

    seconds: float
    paused: float
    ran: float
    waited: float
    floor_whole: float
    floor_paused: float
    floor_ran: float
    result: dict[str, Any]


_Floor = Callable[[Sequence[Peer], Sequence[Peer], bool], tuple[float, float]]


def _rounds(
    trainers: Sequence[Peer], engines: Sequence[Peer], rounds: int, streamed: bool, floor: _Floor, note: Callable[[str], None]
) -> Iterator[_Round]:
    for number in range(rounds + 1):
        together(trainers, do="change", seed=number * 7919)
        before = together(engines, do="processor")
        floor_whole, floor_paused = floor(trainers, engines, streamed)
        between = together(engines, do="processor")
        answers = together(trainers, do="publish", number=number)
        result = answers[0]["result"]
        if not result["ok"]:
            raise RoundFailed(
                f"a benchmark round failed: {result['error']}; {[replica['error'] for replica in result['replicas']]}"
            )
        after = together(engines, do="processor")
        seconds = max(answer["seconds"] for answer in answers)
        paused = result["replicas"][0]["paused_seconds"]
        label = "setup" if number == 0 else f"round {number}"
        floors = f"floors {floor_paused * 1000:.0f} and {floor_whole * 1000:.0f} ms"
        waited = max(then[1] - earlier[1] for earlier, then in zip(between, after, strict=True))
        note(
            f"{label}: paused {paused * 1000:.0f} ms, publish {seconds * 1000:.0f} ms, {floors}; "
            f"waited for a CPU {waited * 1000:.0f} ms"
        )
        if number:
            floor_ran = sum(then[0] - earlier[0] for earlier, then in zip(before, between, strict=True))
            ran = sum(then[0] - earlier[0] for earlier, then in zip(between, after, strict=True))
            yield _Round(seconds, paused, ran, waited, floor_whole, floor_paused, floor_ran, result)
