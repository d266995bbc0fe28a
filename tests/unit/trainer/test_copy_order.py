"""Copies to a window are in one order, whichever CUDA streams they are on."""

from __future__ import annotations

import pytest
import torch

from weightsync.trainer import stream
from weightsync.trainer.stream_plan import WindowRing


def test_a_copy_on_another_stream_waits_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With streams that note what they wait for; ``tests/gpu`` copies for real. The default stream's handle is 0."""
    ring = WindowRing(torch.zeros(512, dtype=torch.uint8), 256, 0, 1, None)
    publication = stream.StreamedPublication(ring, 1, None, None)
    window = stream._Window()
    waits: list[tuple[int, int]] = []

    class Noted:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def wait_stream(self, other: Noted) -> None:
            waits.append((self.handle, other.handle))

    for handle in (0, 0, 5, 5, 0):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _, handle=handle: handle, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, handle=handle: Noted(handle))
        publication._follow(window)
        assert window.handle == handle
    assert waits == [(5, 0), (0, 5)]
