"""Waits for a device end with it, with its error, or at their deadline."""

from __future__ import annotations

import threading

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, TransportError
from weightsync.tensors.cuda.waiting import wait_until_idle


def test_a_wait_ends_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    wait_until_idle(3, Deadline(60.0), "copying")
    assert asked == [3]


def test_an_error_of_the_device_is_a_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(TransportError, match="copying: CUDA error: unspecified launch failure"):
        wait_until_idle(None, Deadline(60.0), "copying")


def test_a_device_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: released.wait(60.0))
    with pytest.raises(DeadlineExceeded, match="copying did not finish within"):
        wait_until_idle(None, Deadline(0.05), "copying")
    released.set()
