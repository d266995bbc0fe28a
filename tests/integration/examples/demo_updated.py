"""The demo's completion server with the disaggregated routes mounted, in a process of its own; prints its port."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading

import torch
import uvicorn
from examples.demo.completions import completions_app
from examples.demo.completions_adapter import CompletionsAdapter
from examples.demo.generation import Generator
from examples.demo.models import build_model, scramble
from examples.demo.tokenizer import build_tokenizer

from weightsync.config import Secret
from weightsync_disaggregated import DisaggregatedRank, LocalRanks, WeightUpdates, weight_update_routes


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    wish = json.loads(sys.argv[1])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    model = build_model("qwen2", tied=True, seed=0)
    scramble(model, seed=1)
    generator = Generator(model)
    updates = WeightUpdates(LocalRanks(DisaggregatedRank(CompletionsAdapter(generator))))
    app = completions_app("demo", generator, build_tokenizer(0), weight_update_routes(updates, Secret(wish["token"])))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()
