"""One publication to several hosts whose network is the bottleneck: replicas that feed each other, and the star beside it.

``python -m benchmarks.waves`` (root, iproute2). Hosts are network namespaces that send at most ``--egress`` bytes a second each.
The trainer's sent bytes are those that its interface counted.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tests.hosts import Hosts, obstacle

import weightsync

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
_TENSORS = 16
_SECONDS = 240.0
_TRAINER, _HEAD = "train", "head"


def _party(role: str, name: str, mib: int, replicas: int, rounds: int) -> None:
    """A trainer that publishes, or an engine that serves its weights until its input ends."""
    torch.set_num_threads(1)
    state = {key: value.detach() for key, value in _Frozen(mib).named_parameters()}
    if role == "engine":
        with weightsync.Engine(weightsync.ModuleAdapter(_Frozen(mib)), name, transports=["tcp"]):
            print("ready", flush=True)
            sys.stdin.buffer.read()
        return
    with weightsync.Trainer(state, transports=["tcp"]) as trainer:
        trainer.wait_for_replicas(replicas, _SECONDS)
        for number in range(rounds):
            for tensor in state.values():
                tensor.fill_(number + 1)
            sent = _sent()
            result = trainer.publish(timeout=_SECONDS)
            fed = Counter("trainer" if replica.source == "trainer" else "replicas" for replica in result.replicas)
            shown = {"seconds": result.seconds, "sent": _sent() - sent, "updated": len(result.updated), "fed": fed}
            print(json.dumps(shown), flush=True)


class _Frozen(torch.nn.Module):
    """The model: bytes, no gradients."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        for index in range(_TENSORS):
            tensor = torch.zeros((mib << 20) // _TENSORS, dtype=torch.uint8)
            self.register_parameter(f"w{index}", torch.nn.Parameter(tensor, requires_grad=False))


def _sent() -> int:
    return int(Path(f"/sys/class/net/{Hosts.interface}/statistics/tx_bytes").read_text())


def _run(hosts: Hosts, replicas: int, fan_out: int | None, mib: int, rounds: int) -> list[dict[str, Any]]:
    """Publish ``rounds`` times. Returns what each took; the first one also connects."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as owned:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTSYNC_")}
        environment |= {
            "PYTHONPATH": f"{_ROOT}/src:{_ROOT}", "OMP_NUM_THREADS": "1", "WEIGHTSYNC_COORDINATOR": f"http://{_HEAD}:7400",
            "WEIGHTSYNC_TOKEN": secrets.token_hex(16), "WEIGHTSYNC_DATA_ENCRYPTION": "off", "WEIGHTSYNC_STATE_DIR": directory,
            "WEIGHTSYNC_SERVE_WEIGHTS": "on", "WEIGHTSYNC_REQUIRE": "all",
        }  # fmt: skip
        if fan_out is not None:
            environment["WEIGHTSYNC_FAN_OUT"] = str(fan_out)

        def start(host: str, *command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                hosts.on(host, sys.executable, "-m", *command), env=environment, cwd=_ROOT, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            owned.callback(process.wait, 60)
            owned.callback(process.terminate)
            return process

        start(_HEAD, "weightsync", "serve", "--host", _HEAD)
        same = ["--mib", str(mib), "--replicas", str(replicas), "--rounds", str(rounds)]
        engines = [start(f"r{index}", "benchmarks.waves", "--party", f"engine:r{index}", *same) for index in range(replicas)]
        for engine in engines:
            if engine.stdout is None or engine.stdout.readline() != "ready\n":
                raise SystemExit("an engine did not join")
        trainer = start(_TRAINER, "benchmarks.waves", "--party", "trainer:", *same)
        return [json.loads(line) for line in trainer.stdout or ()]


def main() -> None:
    """Print a table of one replica alone, the star and the waves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--mib", type=int, default=256, help="MiB of the model")
    parser.add_argument("--egress", type=int, default=100_000_000, help="bytes per second that a host sends at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--party", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.party:
        role, _, name = options.party.partition(":")
        _party(role, name, options.mib, options.replicas, options.rounds)
        return
    if reason := obstacle():
        raise SystemExit(reason)
    names = [_HEAD, _TRAINER, *(f"r{index}" for index in range(options.replicas))]
    floor = (options.mib << 20) / options.egress
    print(f"{options.mib} MiB, egress {options.egress / 1e6:g} MB/s, {os.cpu_count()} cores; floor of one copy {floor:.2f} s")
    print("| run | seconds of each round | best / one copy | copies that the trainer sent | fed by the trainer |")
    print("|---|---|---|---|---|")
    with Hosts.made(*names, egress=options.egress) as hosts:
        one = 0.0
        for label, replicas, fan_out in (("one", 1, None), ("waves", options.replicas, 1), ("star", options.replicas, None)):
            rounds = _run(hosts, replicas, fan_out, options.mib, options.rounds)
            best = min(entry["seconds"] for entry in rounds)
            one = one or best
            seconds = ", ".join(f"{entry['seconds']:.2f}" for entry in rounds)
            copies = max(entry["sent"] for entry in rounds) / (options.mib << 20)
            fed = max(entry["fed"].get("trainer", 0) for entry in rounds)
            assert all(entry["updated"] == replicas for entry in rounds)
            print(f"| {label}, {replicas} replicas | {seconds} | {best / one:.2f} | {copies:.2f} | {fed} |", flush=True)


if __name__ == "__main__":
    main()
