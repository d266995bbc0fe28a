"""A rank of a group that takes maxima. It gives up placings of which the other may never hear, and reports the others.

At last a trainer's role places version 7 twice, because one rank was never asked the first time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, WeightSyncError
from weightsync.model import Manifest, TensorSpec
from weightsync.protocol.messages import Place, Placed
from weightsync.publishing.publication import ReaderAccess
from weightsync.publishing.published_shards import ShardOptions
from weightsync.tensors.quantization import formats_by_pattern
from weightsync.tensors.shards import Shard, ShardedState, shard
from weightsync.trainer.maxima_group import MaximaGroup
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.hostinfo import this_host
from weightsync.transports.registry import transport

SECONDS = 30.0


class Half(ShardedState):
    """Half of the rows of a matrix in one block of 128 x 128."""

    def __init__(self, rank: int) -> None:
        self.shards = [shard("w.weight", torch.full((64, 128), 1.0 + rank).bfloat16(), (128, 128), (64 * rank, 0))]

    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        return Manifest([TensorSpec("w.weight", (128, 128), "bfloat16")]), self.shards


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = MaximaGroup(rank, 2)
    outcomes: dict[int, float | str] = {}
    for order in (1, 2, 3, 4, 5, 6):
        if (order, rank) == (2, 1):
            continue  # the coordinator had given placing 2 up before this rank was asked
        group.order = order
        if (order, rank) in ((2, 0), (5, 1)):
            group.give_up()
            continue
        values = torch.tensor([float(rank * order)])
        try:
            group.all_max(values, Deadline(SECONDS))
            outcomes[order] = float(values)
        except WeightSyncError as error:
            outcomes[order] = type(error).__name__
    options = ShardOptions(quantize=lambda manifest: formats_by_pattern(manifest, {"*": "fp8-block"}))
    role = TrainerRole(Half(rank), ReaderAccess([transport("inproc")], b"k" * 32, this_host()), options, ranks=group)
    if rank == 0:
        try:
            role.handle(Place(7, call=1, order=7), SECONDS)
        except Aborted:  # its call of publish() was interrupted
            outcomes[7] = "Aborted"
    role.arm(2, 7)
    assert isinstance(role.handle(Place(7, call=2, order=8), SECONDS), Placed)
    outcomes[8] = "Placed"
    if rank == 0:  # a restarted coordinator asks it again for what it has placed, and the other rank for the next version
        assert isinstance(role.handle(Place(7, call=2, order=9), SECONDS), Placed)
    else:
        role.arm(3, 8)
        try:
            role.handle(Place(8, call=3, order=9), SECONDS)
        except Aborted:
            outcomes[9] = "Aborted"
    role.disarm()
    role.arm(4, 8)
    assert isinstance(role.handle(Place(8, call=4, order=10), SECONDS), Placed)
    outcomes[10] = "Placed"
    role.close()
    print(json.dumps(outcomes), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
