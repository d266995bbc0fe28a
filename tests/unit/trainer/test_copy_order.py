"""Copies to a window are in one order, whichever CUDA streams they are on."""

from __future__ import annotations

import pytest
import torch

from weightsync.trainer import stream


def test_the_first_copy_to_a_window_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stream of the CPU, which compares as one of a GPU does: it is not unequal to None. ``tests/gpu`` copies for real."""
    publication = stream.StreamedPublication(torch.zeros(512, dtype=torch.uint8), 256, 0, 1, None, 1)
    window, current = stream._Window(), torch.Stream(device="cpu")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    publication._follow(window)
    assert window.stream is current
