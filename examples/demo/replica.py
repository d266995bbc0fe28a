"""A replica's process: scrambled weights, a completion server, and one ``weightsync.Engine``."""

from __future__ import annotations

import socket
import sys
from contextlib import closing

import msgspec

from examples.demo.reports import Parent, Ready, die_with_parent
from examples.demo.settings import ReplicaSettings

__all__ = ["main"]


def main(argument: str) -> int:
    """Serve until a signal ends the process. ``argument`` is :class:`~examples.demo.settings.ReplicaSettings` as JSON."""
    mine = msgspec.json.decode(argument, type=ReplicaSettings)
    die_with_parent(mine.parent)
    parent = Parent()
    listener = socket.socket(fileno=mine.listen_fd)

    # Imported here so that the process is tied to its parent before the seconds that these take.
    import torch
    import uvicorn

    from examples.demo.completions import SLOTS, completions_app
    from examples.demo.completions_adapter import CompletionsAdapter
    from examples.demo.generation import Generator
    from examples.demo.held_adapter import HeldAdapter
    from examples.demo.lora_adapter import LoraAdapter
    from examples.demo.models import build_model, scramble
    from examples.demo.oracle import RANK
    from examples.demo.tokenizer import build_tokenizer
    from weightsync.config import ClientSettings
    from weightsync.engine.engine import Engine
    from weightsync.model.lora import LoraSlots
    from weightsync.protocol.tokens import secret_of
    from weightsync_disaggregated import DisaggregatedRank, LocalRanks, WeightUpdates, weight_update_routes

    torch.set_num_threads(1)
    wish = mine.settings
    model = build_model(wish.model, tied=wish.tied, seed=wish.seed)
    scramble(model, seed=sum(mine.name.encode()))
    # Each adapter's versions that are kept, the one that retires the oldest, and what running requests still use.
    generator = Generator(model, LoraSlots(wish.adapters * (wish.keep + 1) + SLOTS, RANK) if wish.adapters else None)
    if generator.loras is not None:
        adapter: CompletionsAdapter = LoraAdapter(generator, generator.loras)
    else:
        adapter = HeldAdapter(generator, mine.name, parent) if wish.kill else CompletionsAdapter(generator)
    # The agent and these routes drive one adapter: whoever trains uses one of them at a time.
    token = secret_of(ClientSettings.load(coordinator=mine.coordinator))
    ranks = LocalRanks(DisaggregatedRank(adapter))
    more = [] if token is None else weight_update_routes(WeightUpdates(ranks), token)
    app = completions_app(mine.name, generator, build_tokenizer(wish.seed), more)
    # Idle connections stay open, here as at the client: a request could meet one that is being closed.
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, timeout_keep_alive=600)
    server = uvicorn.Server(config)
    dense = wish.deltas and wish.replicas > 1 and mine.name.endswith(f"-{wish.replicas - 1}")
    with closing(ranks), Engine(
        adapter, mine.name, mine.coordinator, delivery=wish.delivery, transports=wish.transports,
        bucket_bytes=1 if dense else None,  # no changes find room: this one gets all bytes, for comparison
    ):  # fmt: skip
        parent.tell(Ready(mine.name))
        server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
