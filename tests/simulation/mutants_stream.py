"""Bugs planted in rounds whose source is a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from tests.simulation.installation import replaced

from weightsync.coordinator import stream_round
from weightsync.coordinator.stream_round import WindowFlow
from weightsync.deadline import Deadline
from weightsync.trainer.stream import StreamedPublication, stream_item

__all__ = ["STREAM_MUTANTS"]


def _windows_freed_early() -> AbstractContextManager[None]:
    return replaced((WindowFlow, "released", property(lambda flow: len(flow.placed))))


def _windows_never_freed() -> AbstractContextManager[None]:
    return replaced((WindowFlow, "leave", lambda flow, replica: None))


def _digests_not_compared() -> AbstractContextManager[None]:
    return replaced((stream_round, "_compare", lambda *_: None), (stream_round, "_verify", lambda *_: None))


def _iterator_left() -> AbstractContextManager[None]:
    def broken(publication: StreamedPublication, tensors: Iterable[tuple[str, torch.Tensor]], deadline: Deadline) -> None:
        for item in tensors:
            publication._take(*stream_item(item), deadline)
        publication._finish(deadline)

    return replaced((StreamedPublication, "drain", broken))


STREAM_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "windows of a stream are freed before they were read": _windows_freed_early,
    "a replica that failed still holds windows": _windows_never_freed,
    "digests of a stream are not compared": _digests_not_compared,
    "an iterator is left when its stream fails": _iterator_left,
}
"""Name to what plants it for as long as a ``with`` block runs. Schedules of streams notice them."""
