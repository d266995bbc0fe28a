"""A rank of a group that takes maxima. It gives up versions of which the other may never hear, and reports the other versions."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.trainer.maxima_group import MaximaGroup


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = MaximaGroup(rank, 2)
    outcomes: dict[int, float | str] = {}
    for number in (1, 2, 3, 4, 5, 6):
        if (number, rank) == (2, 1):
            continue  # the coordinator had given version 2 up before this rank was asked
        group.number = number
        if (number, rank) in ((2, 0), (5, 1)):
            group.give_up()
            continue
        values = torch.tensor([float(rank * number)])
        try:
            group.all_max(values, Deadline(30))
            outcomes[number] = float(values)
        except WeightSyncError as error:
            outcomes[number] = type(error).__name__
    group.close()
    print(json.dumps(outcomes), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
