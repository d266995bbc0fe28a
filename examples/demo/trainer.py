"""A trainer rank's process: train, save the oracle's checkpoint, publish, again."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from examples.demo.ranks import join
from examples.demo.reports import Parent, Publication, Ready, Saved, Step, die_with_parent
from examples.demo.settings import TrainerSettings
from weightsync.deadline import Deadline

__all__ = ["main"]

_PATIENCE = 300.0  # seconds that ranks wait for each other, for the parent, and for a round


def main(argument: str) -> int:
    """Train and publish. ``argument`` is :class:`~examples.demo.settings.TrainerSettings` as JSON."""
    mine = msgspec.json.decode(argument, type=TrainerSettings)
    die_with_parent(mine.parent)
    parent = Parent()

    # Imported here so that the process is tied to its parent before the seconds that these take.
    import torch
    import torch.distributed as dist

    from examples.demo.models import build_model
    from weightsync.trainer.agent import Trainer

    torch.set_num_threads(1)
    wish, first = mine.settings, mine.rank == 0
    model = build_model(wish.model, tied=wish.tied, seed=wish.seed)
    join(mine.rank, mine.world_size, mine.port, mine.listen_fd, _PATIENCE)
    try:
        if wish.trainer == "megatron":
            from examples.demo.megatron_training import MegatronTraining as Training
        else:
            from examples.demo.training import Training  # type: ignore[assignment]
        training = Training(model, wish.seed)
        with Trainer(training.state, mine.coordinator, dtype=training.dtype, transports=wish.transports) as trainer:
            parent.tell(Ready(f"trainer-{mine.rank}"))
            for version in range(1, wish.versions + 1):
                for step in range(wish.steps):
                    loss = training.step()
                    if first:
                        parent.tell(Step((version - 1) * wish.steps + step + 1, loss))
                training.save(Path(mine.directory), version)
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
