"""Records what the pictures of the docs show: ``python -m tests.recording demo`` and ``python -m tests.recording round``.

``demo`` keeps the lines that the demo prints, each with its time. ``round`` keeps the trace of one local round: two trainer ranks,
a replica of two engine ranks, shared memory. Both write to ``docs/data``; ``python -m tests.pictures`` draws from there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.integration.service_support import free_port

from weightsync.bench.peer import Peer, together
from weightsync.cli.rounds import write_trace
from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.server.server import BackgroundServer

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data"
_RANKS = 2
_COLUMNS = "116"


def _demo() -> None:
    command = [sys.executable, "-m", "examples.demo", "--versions", "3"]
    environment = {**os.environ, "COLUMNS": _COLUMNS, "PYTHONUNBUFFERED": "1"}
    started, lines = time.monotonic(), []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        if process.stdout is not None:
            lines = [{"seconds": round(time.monotonic() - started, 2), "text": line.rstrip()} for line in process.stdout]
    if process.returncode:
        raise SystemExit(f"the demo ended with status {process.returncode}")
    _keep("demo.json", {"command": "make demo ARGS='--versions 3'", "lines": lines})


def _round() -> None:
    with ExitStack() as owned:
        server = owned.enter_context(BackgroundServer(ServerSettings(port=0, state_dir="off", run="demo")))
        config = {
            "coordinator": server.url, "token": server.token, "rendezvous": f"tcp://127.0.0.1:{free_port()}", "world": _RANKS,
            "transport": "shared_memory", "delivery": "direct", "size": 1 << 29, "tensors": 300,
        }  # fmt: skip
        peers = [
            [owned.enter_context(Peer("weightsync.bench.rank", {**config, "role": role, "rank": rank})) for rank in range(_RANKS)]
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


def _keep(name: str, data: object) -> None:
    (DATA / name).write_text(json.dumps(data, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Record what is named."""
    recordings = {"demo": _demo, "round": _round}
    if not arguments or not set(arguments) <= set(recordings):
        raise SystemExit(f"say what to record: {', '.join(recordings)}")
    for name in arguments:
        recordings[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
