"""A trainer rank's process: train, save the oracle's checkpoint, publish, again."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec

from examples.demo.reports import Parent, Publication, Ready, Saved, Step, die_with_parent
from examples.demo.settings import TrainerSettings
from weightsync.deadline import Deadline

__all__ = ["main"]

_PATIENCE = 300.0  # seconds that ranks wait for each other, for the parent, and for a round


def _join(mine: TrainerSettings) -> None:
    import torch.distributed as dist

    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback  # else gloo asks the resolver for this machine's name
    patience = timedelta(seconds=_PATIENCE)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", mine.port, mine.world_size, is_master=mine.rank == 0, timeout=patience, master_listen_fd=mine.listen_fd
    )
    dist.init_process_group("gloo", store=store, rank=mine.rank, world_size=mine.world_size, timeout=patience)


def main(argument: str) -> int:
    """Train and publish. ``argument`` is :class:`~examples.demo.settings.TrainerSettings` as JSON."""
    mine = msgspec.json.decode(argument, type=TrainerSettings)
    die_with_parent(mine.parent)
    parent = Parent()

    # Imported here so that the process is tied to its parent before the seconds that these take.
    import torch
    import torch.distributed as dist

    from examples.demo.models import build_model
    from examples.demo.oracle import save_checkpoint
    from examples.demo.training import Training
    from weightsync.trainer.agent import Trainer

    torch.set_num_threads(1)
    wish, first = mine.settings, mine.rank == 0
    model = build_model(wish.model, tied=wish.tied, seed=wish.seed)
    _join(mine)
    try:
        training = Training(model, wish.seed)
        with Trainer(model, mine.coordinator, transports=wish.transports) as trainer:
            parent.tell(Ready(f"trainer-{mine.rank}"))
            for version in range(1, wish.versions + 1):
                for step in range(wish.steps):
                    loss = training.step()
                    if first:
                        parent.tell(Step((version - 1) * wish.steps + step + 1, loss))
                save_checkpoint(model, Path(mine.directory), version)
                if first:
                    parent.tell(Saved(version))
                    parent.wait_for_word(Deadline(_PATIENCE))
                dist.barrier()
                started = time.perf_counter()
                result = trainer.publish(version, timeout=_PATIENCE)
                if first:
                    parent.tell(Publication(version, time.perf_counter() - started, result))
            if first:
                parent.wait_for_word(Deadline(_PATIENCE))  # the shelves stay until the last probe was answered
            dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
