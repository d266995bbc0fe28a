"""The trainer's ranks as a group that takes maxima together, in a process group of ``torch.distributed`` made for that."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, PeerLost, WeightSyncError

_REMEDY = "make a new weightsync.Trainer on every rank"


class MaximaGroup:
    """Takes elementwise maxima over all trainer ranks, each time after a barrier of the coordinator.

    Every rank takes part or calls :meth:`give_up`, so that the others need not wait for it. Once a rank did neither before the
    deadline, the group is :attr:`broken`. Making one is collective.

    Raises:
        ConfigurationError: ``torch.distributed`` does not connect the trainer's ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        known = dist.is_available() and dist.is_initialized()
        if not known or (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ConfigurationError(
                f"quantize= needs torch.distributed over the trainer's {world_size} ranks, numbered alike, for the maxima of "
                "blocks that the borders of shards cut: call torch.distributed.init_process_group() before making the Trainer"
            )
        self._group = dist.new_group(backend="gloo")
        self.broken = ""
        """Why no further maxima can be taken; empty while they can."""
        self.turns = 0
        """Maxima that this rank has begun to take."""

    def all_max(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Replace each element of a CPU tensor by its maximum over all ranks.

        Raises:
            Aborted: Another rank gave up.
            PeerLost: The group is broken.
        """
        self.check()
        message = torch.cat([tensor.reshape(-1), tensor.new_zeros(1)])
        self.turns += 1
        try:
            work = dist.all_reduce(message, dist.ReduceOp.MAX, self._group, async_op=True)
            finished = work is not None and work.wait(timedelta(seconds=deadline.remaining("waiting for the other trainer ranks")))
        except (RuntimeError, WeightSyncError) as error:
            self.broken = f"a trainer rank did not take part in the maxima of quantized weights ({error})"
            raise self.error() from error
        if not finished or message[-1]:
            raise Aborted("another trainer rank gave up this version before it had quantized its weights")
        tensor.copy_(message[:-1].view(tensor.shape))

    def give_up(self, size: int) -> None:
        """Let the other ranks, which take maxima of ``size`` elements of ``float32`` now, go on without a result. Does not wait."""
        with suppress(RuntimeError):
            self.turns += 1
            dist.all_reduce(torch.cat([torch.zeros(size), torch.ones(1)]), dist.ReduceOp.MAX, self._group, async_op=True)

    def check(self) -> None:
        """Raise :meth:`error` if the group is broken."""
        if self.broken:
            raise self.error()

    def error(self) -> PeerLost:
        """The error of a broken group."""
        return PeerLost(f"{self.broken}: {_REMEDY}")

    def close(self) -> None:
        """Leave the group. Safe twice."""
        if dist.is_initialized():
            with suppress(ValueError, RuntimeError, AssertionError):  # the framework destroyed it
                dist.destroy_process_group(self._group)
