"""Bounded waits for a CUDA device, and the choice of the current one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from weightsync.daemon_threads import in_daemon_thread
from weightsync.deadline import Deadline
from weightsync.errors import TransportError


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the CUDA device of ``tensor`` the current one; nothing for host memory, where Triton's interpreter runs kernels."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def wait_for_event(event: torch.cuda.Event, deadline: Deadline, what: str) -> None:
    """Wait for ``event``.

    Raises:
        DeadlineExceeded: ``deadline`` passed.
        TransportError: The device reported an error.
    """
    if not event.query():  # type: ignore[no-untyped-call]
        _wait(event.synchronize, deadline, what)


def _wait(synchronize: Callable[[], object], deadline: Deadline, what: str) -> None:
    """Run ``synchronize`` on a thread, because CUDA offers no wait with a timeout. The thread is abandoned if the device hangs."""
    try:
        deadline.result(in_daemon_thread(synchronize, "weightsync-cuda-wait"), what)
    except RuntimeError as error:
        raise TransportError(f"{what}: {error}") from error


def wait_for_device(device: torch.device, deadline: Deadline, what: str) -> None:
    """Wait for all work in the current stream of ``device``. Raises as :func:`wait_for_event` does."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait_for_event(event, deadline, what)


def wait_until_idle(device: torch.device | int | None, deadline: Deadline, what: str) -> None:
    """Wait for all work that this process has queued on ``device``, in any stream. Raises as :func:`wait_for_event` does."""
    _wait(lambda: torch.cuda.synchronize(device), deadline, what)
