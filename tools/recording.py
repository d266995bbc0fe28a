"""Records what the pictures of the docs show: ``python -m tools.recording demo kill round page``, or some of these.

``demo`` keeps the lines that the demo prints, each with its time, and ``kill`` those of the demo that kills processes. ``round``
keeps the trace of one local round: two trainer ranks, a replica of two engine ranks, shared memory. ``page`` keeps what a
coordinator answers its status page after some rounds, the last of them with a slow rank. All write to ``docs/data``;
``python -m tools.pictures`` and ``python -m tools.screenshots`` draw from there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch
from tests.integration.server.service_support import free_port
from tests.integration.server.test_sight import SlowAdapter

import weightsync
from weightsync.cli.rounds import write_trace
from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.server.server import BackgroundServer
from weightsync_bench.peer import Peer, together

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data"
_RANKS = 2
_COLUMNS = "116"
_FEATURES, _ROUNDS = 4096, 8


def _demo(name: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "examples.demo", *arguments]
    environment = {**os.environ, "COLUMNS": _COLUMNS, "PYTHONUNBUFFERED": "1"}
    started, lines = time.monotonic(), []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        if process.stdout is not None:
            lines = [{"seconds": round(time.monotonic() - started, 2), "text": line.rstrip()} for line in process.stdout]
    if process.returncode:
        raise SystemExit(f"the demo ended with status {process.returncode}")
    _keep(name, {"command": f"make demo ARGS='{' '.join(arguments)}'", "lines": lines})


def _round() -> None:
    with ExitStack() as owned:
        server = owned.enter_context(BackgroundServer(ServerSettings(port=0, state_dir="off", run="demo")))
        config = {
            "coordinator": server.url, "token": server.token, "rendezvous": f"tcp://127.0.0.1:{free_port()}", "world": _RANKS,
            "transport": "shared_memory", "delivery": "direct", "size": 1 << 29, "tensors": 300,
        }  # fmt: skip
        peers = [
            [owned.enter_context(Peer("weightsync_bench.rank", {**config, "role": role, "rank": rank})) for rank in range(_RANKS)]
            for role in ("trainer", "engine")
        ]
        for peer in (*peers[0], *peers[1]):
            peer.hear(timeout=180)
        for number in range(4):
            together(peers[0], do="change", seed=number)
            together(peers[0], do="publish", number=number)
        settings = ClientSettings.load(coordinator=server.url, token=Secret(server.token))
        write_trace(settings, None, DATA / "round.json")
    _keep("round.json", json.loads((DATA / "round.json").read_text()))


def _page() -> None:
    replicas = {"rollout-0": [SlowAdapter(features=_FEATURES) for _ in range(2)], "rollout-1": [SlowAdapter(features=_FEATURES)]}
    with ExitStack() as owned:
        server = owned.enter_context(BackgroundServer(ServerSettings(port=0, state_dir="off", run="demo")))
        options: dict[str, Any] = {"coordinator": server.url, "token": server.token, "transports": ["shared_memory"]}
        trainer = owned.enter_context(weightsync.Trainer(torch.nn.Linear(_FEATURES, _FEATURES), **options))
        for replica, ranks in replicas.items():
            for rank, adapter in enumerate(ranks):
                owned.enter_context(weightsync.Engine(adapter, replica, rank=rank, world_size=len(ranks), **options))
        trainer.wait_for_replicas(len(replicas))
        for number in range(_ROUNDS):
            replicas["rollout-0"][1].slow = "flush" if number == _ROUNDS - 1 else ""
            trainer.publish()
        headers = {"Authorization": f"Bearer {server.token}"}
        with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as http:
            answers = {path: http.get(path).raise_for_status().json() for path in ("/v1/status", "/v1/rounds", "/v1/trace")}
    _keep("page.json", json.loads(json.dumps(answers).replace(socket.gethostname(), "host-a")))


def _keep(name: str, data: object) -> None:
    (DATA / name).write_text(json.dumps(data, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Record what is named."""
    recordings = {
        "demo": lambda: _demo("demo.json", "--versions", "3"),
        "kill": lambda: _demo("kill.json", "--kill"),
        "round": _round,
        "page": _page,
    }
    if not arguments or not set(arguments) <= set(recordings):
        raise SystemExit(f"say what to record: {', '.join(recordings)}")
    for name in arguments:
        recordings[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
