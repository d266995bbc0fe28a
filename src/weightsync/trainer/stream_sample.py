"""A trainer rank's sample of its stream: what it digests of tensors that another rank sends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from weightsync.deadline import Deadline
from weightsync.model.sample import is_sampled, sample_box
from weightsync.tensors.cuda.waiting import wait_for_event
from weightsync.tensors.digest import digest_box
from weightsync.tensors.shards import torch_dtype


class _Copy(NamedTuple):
    piece: torch.Tensor
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    copied: torch.cuda.Event | None
    """Set for a tensor on a device: the end of the copy."""


class StreamSample:
    """Small copies of the tensors of version ``number`` that :func:`~weightsync.model.sample.is_sampled` names.

    Nothing waits for a device before :meth:`digests`. Not thread-safe.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._copies: list[_Copy] = []

    def take(self, index: int, tensor: torch.Tensor, dtype: str) -> None:
        """Copy the sample of tensor number ``index`` of the stream, in its published ``dtype``."""
        if not is_sampled(index, self._number):
            return
        published, shape = torch_dtype(dtype), tuple(tensor.shape)
        box = sample_box(shape, published.itemsize, self._number)
        piece = tensor[box].to(published, copy=True)
        event = None
        if piece.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(piece.device))
        self._copies.append(_Copy(piece, shape, tuple(cut.start for cut in box), event))

    def digests(self, deadline: Deadline) -> bytes:
        """Return the digest of each sample, uint64, little-endian.

        Raises:
            DeadlineExceeded: ``deadline`` passed before a device had copied them.
        """
        digests = np.zeros(len(self._copies), "<u8")
        for index, (piece, shape, starts, copied) in enumerate(self._copies):
            if copied is not None:
                wait_for_event(copied, deadline, "copying a sample of the stream")
            digests[index] = digest_box(piece.cpu(), shape, starts)
        return digests.tobytes()
