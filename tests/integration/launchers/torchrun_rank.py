"""One process that torchrun started: a rank of a replica by the environment alone, then a rank of an FSDP2 trainer."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from tests.integration.ray.ray_actors import COLUMNS, ROWS, Half, model
from torch.distributed.fsdp import fully_shard

import weightsync


def main() -> None:
    torch.set_num_threads(1)
    target = torch.nn.Linear(COLUMNS, ROWS // 2)
    half = Half(target, int(os.environ["RANK"]) * ROWS // 2)
    with weightsync.Engine(half) as engine:  # before there is a process group: by torchrun's variables
        dist.init_process_group("gloo")
        source = model(5)
        fully_shard(source)
        with weightsync.Trainer(source) as trainer:
            if (trainer.rank, trainer.world_size) != (dist.get_rank(), dist.get_world_size()):
                sys.exit("the trainer has another place than torch.distributed")
            result = trainer.publish(1, timeout=30)
            print([(one.name, one.state, one.version) for one in result.replicas], flush=True)
            dist.barrier()
        rows = slice(half.first, half.first + ROWS // 2)
        if not torch.equal(target.weight, model(5).weight[rows]):
            sys.exit(f"rank {engine.rank} holds something else")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
