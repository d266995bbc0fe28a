"""The trainer's ranks as a group that takes maxima together, in a process group of ``torch.distributed`` made for that."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, PeerLost, WeightSyncError

_NONE = -(1 << 62)
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
        self.order = -1
        """``Place.order`` of the placing for which maxima are taken next. A version's number would not do: it may be placed again,
        and one rank may not have heard of the first time."""
        self.turns = 0
        """Maxima that this rank has begun to take."""

    def all_max(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        """Replace each element of a CPU tensor by its maximum over all ranks.

        A rank that gave up an earlier placing, of which this one did not hear, is passed over.

        Raises:
            Aborted: Another rank gave up this placing, or is at a later one.
            PeerLost: The group is broken.
        """
        self.check()
        self.turns += 1
        earliest = _NONE
        while earliest != self.order:
            given_up, latest, earliest = self._meet(deadline)
            if given_up == self.order or latest > self.order:
                raise Aborted("another trainer rank gave up this version before it had quantized its weights")
        self._reduce(tensor.view(-1), deadline)

    def _meet(self, deadline: Deadline) -> tuple[int, int, int]:
        """Return the placing that a rank gave up, and the latest and the earliest one that a rank is at."""
        orders = torch.tensor([_NONE, self.order, -self.order])
        self._reduce(orders, deadline)
        given_up, latest, earliest = orders.tolist()
        return given_up, latest, -earliest

    def _reduce(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        try:
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group, async_op=True)
            if work is None or not work.wait(timedelta(seconds=deadline.remaining("waiting for the other trainer ranks"))):
                raise RuntimeError("no answer")
        except (RuntimeError, WeightSyncError) as error:
            self.broken = f"a trainer rank did not take part in the maxima of quantized weights ({error})"
            self.check()

    def give_up(self) -> None:
        """Let the other ranks, which wait for this one, go on without a result. Does not wait itself."""
        self.turns += 1
        orders = torch.tensor([self.order, self.order, -self.order])
        with suppress(RuntimeError):
            dist.all_reduce(orders, dist.ReduceOp.MAX, self._group, async_op=True)

    def check(self) -> None:
        """Raise :class:`~weightsync.errors.PeerLost` if the group is broken."""
        if self.broken:
            raise PeerLost(f"{self.broken}: {_REMEDY}")

    def close(self) -> None:
        """Leave the group. Safe twice."""
        if dist.is_initialized():
            with suppress(ValueError, RuntimeError, AssertionError):  # the framework destroyed it
                dist.destroy_process_group(self._group)
