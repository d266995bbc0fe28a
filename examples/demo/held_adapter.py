"""A replica that can keep a round waiting, so that a process can be killed in the middle of it."""

from __future__ import annotations

from examples.demo.completions_adapter import CompletionsAdapter, Served
from examples.demo.reports import Holding, Parent
from weightsync.deadline import Deadline
from weightsync.model import PauseMode

__all__ = ["HeldAdapter"]


class HeldAdapter(CompletionsAdapter):
    """After a word of the parent, reports its next pause and stays in it until the next word, or until this process is killed.

    It is paused then, holds no version, and the bytes of the new one are still to come.
    """

    pauses_twice = True

    def __init__(self, server: Served, name: str, parent: Parent) -> None:
        super().__init__(server)
        self._name, self._parent = name, parent

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Close the gate, and wait for the parent where it asked for that."""
        deadline = Deadline(timeout)
        super().pause(mode, timeout)
        if self._parent.has_said():
            self._parent.wait_for_word(deadline)
            self._parent.tell(Holding(self._name))
            self._parent.wait_for_word(deadline)
