"""A trainer rank's process: train, save the oracle's checkpoint, publish, again."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from examples.demo.ranks import join
from examples.demo.reports import Adapted, Parent, Publication, Ready, Saved, Step, Unpublished, die_with_parent
from examples.demo.settings import TrainerSettings
from weightsync.deadline import Deadline
from weightsync.errors import RoundFailed

__all__ = ["main"]

_TIMEOUT = 300.0  # seconds that ranks wait for each other, for the parent, and for a round


def main(argument: str) -> int:
    """Train and publish. ``argument`` is :class:`~examples.demo.settings.TrainerSettings` as JSON."""
    mine = msgspec.json.decode(argument, type=TrainerSettings)
    die_with_parent(mine.parent)
    parent = Parent()

    # Imported here so that the process is tied to its parent before the seconds that these take.
    import torch
    import torch.distributed as dist

    from examples.demo.models import build_model
    from examples.demo.tenants import Tenants
    from weightsync.trainer.trainer import Trainer

    torch.set_num_threads(1)
    wish, first = mine.settings, mine.rank == 0
    model = build_model(wish.model, tied=wish.tied, seed=wish.seed)
    join(mine.rank, mine.world_size, mine.port, mine.listen_fd, _TIMEOUT)
    try:
        if wish.trainer == "fsdp":
            from examples.demo.training import Training
        else:
            from examples.demo.megatron_training import MegatronTraining as Training  # type: ignore[assignment]
        directory = Path(mine.directory)
        training = Training(model, wish.seed, mine.epoch, rate=wish.learning_rate, optimizer=wish.optimizer, masters=wish.deltas)
        version, left = 0, wish.versions
        if mine.resume is not None:
            training.resume(directory, mine.resume)
            version = mine.resume[1]
            left -= version
        with Trainer(
            training.state, mine.coordinator, dtype=training.dtype, transports=wish.transports, new_epoch=mine.resume is not None,
            deltas=wish.deltas and 1 << 30,  # enough to list everything, so that the share of changed words is known
        ) as trainer, Tenants(trainer, model, wish.adapters, wish.keep, wish.seed, directory) as tenants:  # fmt: skip
            parent.tell(Ready(f"trainer-{mine.rank}"))
            while left:
                version += 1
                for step in range(wish.steps):
                    loss = training.step()
                    if first:
                        parent.tell(Step((version - 1) * wish.steps + step + 1, loss))
                training.save(directory, (mine.epoch, version))
                if first:
                    parent.tell(Saved(version))
                    parent.wait_for_word(Deadline(_TIMEOUT))
                dist.barrier()
                started = time.perf_counter()
                failure = ""
                try:
                    result = trainer.publish(version, timeout=_TIMEOUT)
                except RoundFailed as error:
                    if not wish.kill:
                        raise
                    failure = str(error)
                failed = torch.tensor(float(bool(failure)))
                dist.all_reduce(failed, dist.ReduceOp.MAX)  # all ranks go on in the same way
                if failed:
                    if first:
                        parent.tell(Unpublished(version, failure or "it failed at another rank"))
                    continue
                left -= 1
                trainer.wait_until_stored(_TIMEOUT)  # where there is a store
                if wish.kill:
                    training.save_optimizer(directory, (mine.epoch, version))
                if first:
                    parent.tell(Publication(version, time.perf_counter() - started, result))
                for adapted, seconds in tenants.publish(version, _TIMEOUT):
                    if first:
                        parent.tell(Adapted(seconds, adapted))
            if first:
                parent.wait_for_word(Deadline(_TIMEOUT))  # the regions stay until the last probe was answered
            dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
