"""What the demo's processes tell their parent, a line of JSON each, and how they stay tied to it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import Aborted
from weightsync.protocol.messages import RoundResult

__all__ = [
    "Adapted",
    "Holding",
    "Listening",
    "Parent",
    "Publication",
    "Ready",
    "Report",
    "Saved",
    "Step",
    "Unpublished",
    "die_with_parent",
]

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class _Report(msgspec.Struct, frozen=True, tag=True):
    """Base of all reports: tagged with the class name."""


class Listening(_Report, frozen=True):
    """The coordinator serves here."""

    url: str


class Ready(_Report, frozen=True):
    """The process has its model and is known to the coordinator."""

    name: str


class Step(_Report, frozen=True):
    """One optimizer step, the loss averaged over the trainer's ranks."""

    step: int
    loss: float


class Saved(_Report, frozen=True):
    """The oracle's checkpoint of this version lies in the directory; the version is published when the parent says so."""

    version: int


class Publication(_Report, frozen=True):
    """A round that this trainer caused is over."""

    number: int
    seconds: float
    result: RoundResult


class Adapted(_Report, frozen=True):
    """A version of an adapter was published; the result's version has the adapter's name as its run."""

    seconds: float
    result: RoundResult


class Unpublished(_Report, frozen=True):
    """A round that this trainer caused failed; it goes on with the next number."""

    number: int
    error: str


class Holding(_Report, frozen=True):
    """This replica is paused in the middle of a round, and stays so until the parent says go on."""

    name: str


Report = Listening | Ready | Step | Saved | Publication | Adapted | Unpublished | Holding


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the one that started it (``parent``, a process id) is gone, however it ended.

    Linux only; elsewhere the demo's janitor does it a moment later.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the call above
        raise SystemExit(1)


class Parent:
    """This process's line to the one that started it. Takes standard output for itself: whatever else prints goes to the log."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._in = 0

    def tell(self, report: msgspec.Struct) -> None:
        """Send one report."""
        os.write(self._out, msgspec.json.encode(report) + b"\n")

    def has_said(self) -> bool:
        """Whether a word of the parent waits to be read."""
        return bool(select.select([self._in], [], [], 0)[0])

    def wait_for_word(self, deadline: Deadline) -> None:
        """Return when the parent says go on (one byte). Raises :class:`~weightsync.errors.Aborted` if it is gone instead."""
        ready, _, _ = select.select([self._in], [], [], deadline.remaining("waiting for the parent"))
        if not ready:
            deadline.remaining("waiting for the parent")
        if not os.read(self._in, 1):
            raise Aborted("the process that started this one is gone")
