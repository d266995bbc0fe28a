"""Pauses of rounds that move only what changed, beside whole versions in the same run: ``python -m benchmarks.deltas``.

A trainer and an engine on one machine, weights in host memory. Rounds alternate: one changes so many words that all
bytes move, the next changes ``--share`` of them. ``--rate 1gbit`` runs it in a network namespace with so slow a
loopback, for which it needs root, ``ip`` and ``tc``. The coordinator's messages go through it too. ``--encrypted`` encrypts data
sockets, as is done between hosts; only then may they compress. With
``--streamed`` whole matrices are streamed to the engine, of which ``--share`` change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable
from itertools import islice

import torch

from weightsync.config import ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import RoundFailed
from weightsync.model.result import RoundResult
from weightsync.protocol.messages import Delivery
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer
from weightsync.transports.base import Transport
from weightsync.transports.tcp.transport import Tcp

_INSIDE = "WEIGHTSYNC_BENCHMARK_INSIDE"


def model(mebibytes: int) -> torch.nn.Sequential:
    """Matrices of 4 MiB, in bfloat16."""
    layers = (torch.nn.Linear(1024, 2048, bias=False, dtype=torch.bfloat16) for _ in range(max(mebibytes // 4, 1)))
    return torch.nn.Sequential(*layers).requires_grad_(requires_grad=False)


def change(module: torch.nn.Module, share: float) -> None:
    """Change so many of the words, by their lowest bit."""
    change_in(module.parameters(), share)


def change_in(parameters: Iterable[torch.Tensor], share: float) -> None:
    """The same in some parameters."""
    for parameter in parameters:
        words = parameter.view(torch.int16)
        words ^= (torch.rand(words.shape) < share).to(torch.int16)


def measured(
    mebibytes: int, share: float, transport: str | Transport, rounds: int, delivery: Delivery = "direct"
) -> dict[str, float]:
    """Medians in milliseconds, bytes, and ratios.

    Raises:
        RoundFailed: A round was not verified, or moved other bytes than it should have.
    """
    source, target = model(mebibytes), model(mebibytes)
    found: dict[bool, list[RoundResult]] = {False: [], True: []}
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer(source, server.url, token=server.token, transports=[transport], deltas=True) as trainer,
        Engine(ModuleAdapter(target), "replica-0", server.url, token=server.token, transports=[transport], delivery=delivery),
    ):
        trainer.wait_for_replicas(timeout=300.0)
        trainer.publish(timeout=600.0)
        for number in range(2 * rounds + 2):
            some = bool(number % 2)
            if some and delivery == "streamed":
                change_in(islice(source.parameters(), max(round(share * len(source)), 1)), 0.01)
            else:
                change(source, share if some else 0.3)
            result = trainer.publish(timeout=600.0)
            (replica,) = result.replicas
            if replica.verified != "installed" or (replica.base is not None) is not some:
                raise RoundFailed(f"the round should have moved {'what changed' if some else 'all bytes'}: {replica}")
            if number > 1:
                found[some].append(result)
    if not all(torch.equal(one, other) for one, other in zip(source.parameters(), target.parameters(), strict=True)):
        raise RoundFailed("the engine does not hold what was published")
    row: dict[str, float] = {}
    for name, results in (("dense", found[False]), ("changes", found[True])):
        row[f"{name}_paused_ms"] = 1e3 * statistics.median(result.replicas[0].paused_seconds for result in results)
        row[f"{name}_round_ms"] = 1e3 * statistics.median(result.seconds for result in results)
        row[f"{name}_bytes"] = float(statistics.median(result.nbytes for result in results))
    for what in ("paused_ms", "round_ms", "bytes"):
        row[f"{what}_ratio"] = row[f"changes_{what}"] / row[f"dense_{what}"]
    return row


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--transport", default="shared_memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", help="of the loopback, as tc writes it")
    parser.add_argument("--encrypted", action="store_true", help="over TCP")
    parser.add_argument("--streamed", action="store_true")
    options = parser.parse_args()
    if options.rate and _INSIDE not in os.environ:
        slow = f"tc qdisc add dev lo root tbf rate {options.rate} burst 256kb latency 100ms"
        command = f'ip link set lo up && {slow} && exec "$@"'
        arguments = ["unshare", "-n", "sh", "-c", command, "sh", sys.executable, "-m", "benchmarks.deltas", *sys.argv[1:]]
        os.execvpe("unshare", arguments, os.environ | {_INSIDE: "yes"})
    transport = Tcp(encrypt=True) if options.encrypted else options.transport
    row = measured(options.mebibytes, options.share, transport, options.rounds, "streamed" if options.streamed else "direct")
    print(
        json.dumps(
            {"transport": options.transport, "encrypted": options.encrypted, "rate": options.rate, "share": options.share} | row
        )
    )


if __name__ == "__main__":
    main()
