"""Agreement of the ranks that use a module in step: each enters together with the others, or waits with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync import forks
from weightsync.daemon_threads import in_daemon_thread
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, PeerLost

_FOREVER = timedelta(days=7)  # of the group alone: every wait has its own deadline
_VOTE_SECONDS = 1.0
"""A vote is waited for at least that long. All ranks are here, and where one gives it up and the others do not, they go apart."""


class InStep:
    """Lets ``ranks`` of the default process group answer questions together, over a separate gloo group.

    Each rank calls the same methods in the same order. A vote that does not end in time is waited for again by the next call: the
    others may have its result. The group is made by the first call. Not thread-safe.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._making: Future[Any] | None = None
        self._asked = deque[Any]()
        """Questions that this rank has answered, and of which it has not heard the others' answers."""
        self._gave_up = False
        self.voting = False
        """Whether a vote of this rank is still counted."""

    def meet(self, deadline: Deadline, *numbers: int) -> list[int]:
        """Wait until all ranks are here, and return the least that any of them gave of each number.

        A rank that gives up votes against, or the others would hold their votes for it.

        Raises:
            DeadlineExceeded: One did not come in time.
            PeerLost: One has left.
        """
        if self._gave_up:
            self._answers(deadline, 0.0)
            self._gave_up = False
        try:
            return self._all((1, *numbers), deadline, 0.0, met=True)[1:]
        except BaseException as error:
            if self._asked and not isinstance(error, PeerLost):
                self._asked.append(self._ask((0, 1), deadline, _VOTE_SECONDS))
                self._gave_up = True
            raise

    def vote(self, free: bool, deadline: Deadline, able: bool = True) -> tuple[bool, bool]:
        """Return whether all ranks are ``free``, and all are ``able``, once all have met.

        Raises as :meth:`meet` does, and is then called again.
        """
        self.voting = True
        agreed, can = self._all((free, able), deadline, _VOTE_SECONDS)
        self.voting = False
        return bool(agreed), bool(can)

    def _all(self, answers: Sequence[int], deadline: Deadline, least: float, *, met: bool = False) -> list[int]:
        if not self._asked:
            self._asked.append(self._ask(answers, deadline, least))
        return self._answers(deadline, least, met=met)

    def _answers(self, deadline: Deadline, least: float, *, met: bool = False) -> list[int]:
        """Wait for the others' answers to all questions, and return the least of each part of the last one.

        If all have ``met``, this rank owes its vote from before it forgets the question: a signal handler may raise in between.
        """
        agreed = list[int]()
        while self._asked:
            agreed = self._answer(self._asked[0], deadline, least)
            self.voting = self.voting or met
            self._asked.popleft()
        return agreed

    @property
    def _what(self) -> str:
        return f"waiting for the other ranks of this replica ({len(self.ranks)} in all) to call in_use()"

    def _ask(self, answers: Sequence[int], deadline: Deadline, least: float) -> Any:  # noqa: ANN401 - private to torch
        """Answer a question for this rank."""
        group, least_of_all = self._group(deadline, least), torch.tensor(answers, dtype=torch.int64, device="cpu")
        return dist.all_reduce(least_of_all, dist.ReduceOp.MIN, group=group, async_op=True), least_of_all, group

    def _answer(self, asked: Any, deadline: Deadline, least: float) -> list[int]:  # noqa: ANN401
        """What all ranks say to a question: the least of each part."""
        work, least_of_all, group = asked
        try:
            work.wait(timedelta(seconds=max(deadline.left, least) or deadline.remaining(self._what)))
        except RuntimeError as error:
            if not work.is_completed():
                forks.keep_for_ever(group)  # its destructor would wait for the others, at the end of this process
                raise DeadlineExceeded(f"{self._what} took more than {deadline.seconds:g} s") from None
            if not work.is_success():
                raise PeerLost(f"{self._what} failed, because one of them has left: {str(error).splitlines()[0]}") from error
        answers: list[int] = least_of_all.tolist()
        return answers

    def _group(self, deadline: Deadline, least: float) -> Any:  # noqa: ANN401
        """Make the group, in a thread, because torch waits for the others without regard to a deadline."""
        if self._making is None:
            self._making = in_daemon_thread(self._make, "weightsync-in-step")
        try:
            made = self._making.result(max(deadline.left, least) or deadline.remaining(self._what))
        except TimeoutError:
            raise DeadlineExceeded(f"{self._what} took more than {deadline.seconds:g} s") from None
        if isinstance(made, str):  # an error that is kept would keep the frames of all who get it
            raise PeerLost(made)
        return made

    def _make(self) -> Any:  # noqa: ANN401 - torch's
        try:
            return dist.new_group(self.ranks, backend="gloo", timeout=_FOREVER, use_local_synchronization=True)
        except Exception as error:  # noqa: BLE001 - raised by who waits
            return f"the ranks {self.ranks} could not make a process group: {error}"
