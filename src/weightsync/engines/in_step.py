"""Agreement of the ranks that use a module in step: each enters together with the others, or waits with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync import forks
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, PeerLost

_FOREVER = timedelta(days=7)  # of the group alone: every wait has its own deadline


class InStep:
    """Lets ``ranks`` of the default process group answer questions together, over a separate gloo group.

    Each rank calls the same methods in the same order. An answer that does not come in time is waited for again by the next call:
    the others may have it. The group is made by the first call. Not thread-safe.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._making: Future[Any] | None = None
        self._pending: tuple[Any, torch.Tensor] | None = None
        self.voting = False
        """Whether a vote of this rank is still counted."""

    def meet(self, deadline: Deadline) -> None:
        """Wait until all ranks are here.

        Raises:
            DeadlineExceeded: One did not come in time.
            PeerLost: One has left.
        """
        self._all(True, deadline)

    def vote(self, free: bool, deadline: Deadline) -> bool:
        """Return whether all ranks are ``free``, once all have met. Raises as :meth:`meet` does, and is then called again."""
        self.voting = True
        agreed = self._all(free, deadline)
        self.voting = False
        return agreed

    def _all(self, flag: bool, deadline: Deadline) -> bool:
        what = f"waiting for the other ranks of this replica ({len(self.ranks)} in all) to call in_use()"
        group = self._group(deadline, what)
        if self._pending is None:
            flags = torch.tensor([int(flag)], dtype=torch.int32, device="cpu")
            self._pending = dist.all_reduce(flags, dist.ReduceOp.MIN, group=group, async_op=True), flags
        work, flags = self._pending
        try:
            work.wait(timedelta(seconds=deadline.remaining(what)))
        except RuntimeError as error:
            if not work.is_completed():
                forks.keep_for_ever(group)  # its destructor would wait for the others, at the end of this process
                raise DeadlineExceeded(f"{what} took more than {deadline.seconds:g} s") from None
            if not work.is_success():
                raise PeerLost(f"{what} failed, because one of them has left: {str(error).splitlines()[0]}") from error
        self._pending = None
        return bool(flags.item())

    def _group(self, deadline: Deadline, what: str) -> Any:  # noqa: ANN401 - private to torch
        """Make the group, in a thread, because torch waits for the others without regard to a deadline."""
        if self._making is None:
            self._making = Future()
            threading.Thread(target=self._make, args=(self._making,), name="weightsync-in-step", daemon=True).start()
        try:
            made = self._making.result(deadline.remaining(what))
        except TimeoutError:
            raise DeadlineExceeded(f"{what} took more than {deadline.seconds:g} s") from None
        if isinstance(made, str):  # an error that is kept would keep the frames of all who get it
            raise PeerLost(made)
        return made

    def _make(self, making: Future[Any]) -> None:
        try:
            making.set_result(dist.new_group(self.ranks, backend="gloo", timeout=_FOREVER, use_local_synchronization=True))
        except Exception as error:  # noqa: BLE001 - raised by who waits
            making.set_result(f"the ranks {self.ranks} could not make a process group: {error}")
