"""Which device holds shards, and their layout and digests where they lie there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.model import Layout, Manifest
from weightsync.tensors.cuda.digest import LayoutDigest
from weightsync.tensors.cuda.waiting import wait_for_device, wait_until_idle
from weightsync.tensors.memory import layout_in_place
from weightsync.tensors.shards import Shard

__all__ = ["DeviceDigest", "Form", "device_of", "forms_of", "layout_by_shard", "wait_for_devices"]

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def device_of(shards: Sequence[Shard]) -> torch.device | None:
    """The one device that holds all of ``shards`` (the CPU if there is nothing to hold); ``None`` if they are on several."""
    devices = {one.tensor.device for one in shards if one.tensor.numel()}
    if len(devices) > 1:
        return None
    return devices.pop() if devices else torch.device("cpu")


def wait_for_devices(shards: Sequence[Shard], deadline: Deadline) -> None:
    """Return when all that this process has queued on the CUDA devices that hold ``shards`` is done, in whatever stream.

    Raises :class:`~weightsync.errors.DeadlineExceeded`, or what a device reports as a TransportError.
    """
    for device in {one.tensor.device for one in shards}:
        if device.type == "cuda":
            wait_until_idle(device, deadline, f"what this trainer rank has queued on {device}")


def forms_of(tensors: Sequence[torch.Tensor]) -> list[Form]:
    """Shape, strides, dtype and device of each tensor: all that says how its memory is read, but for where it is."""
    return [(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]


def layout_by_shard(manifest: Manifest, shards: Sequence[Shard]) -> Layout:
    """The layout of ``shards`` (in manifest order) where they lie, each a region of its own.

    So it stays the same, and plans stay valid, when a shard gets memory elsewhere. Raises
    :class:`~weightsync.errors.LayoutError` for what cannot be read as it is: another dtype than the manifest's, or an expanded
    tensor.
    """
    found, _ = layout_in_place(manifest, shards, block_bytes=None)
    last = ((found.stops - found.starts - 1) * found.strides).sum(axis=1)
    sizes = last + manifest.itemsizes[found.tensor]
    return Layout(
        manifest,
        found.tensor,
        found.starts,
        found.stops,
        np.arange(len(found), dtype=np.int32),
        np.zeros(len(found), np.int64),
        found.strides,
        tuple(sizes.tolist()),
    )


class DeviceDigest:
    """The digest of every row of ``layout`` in the memory of a CUDA device, wherever its regions are at the time.

    Tables are built when addresses are first seen, and again when they change. Used by one thread at a time.
    """

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self._manifest, self._layout, self._device = manifest, layout, device
        self._addresses: tuple[int, ...] | None = None
        self._digest: LayoutDigest

    def build(self, addresses: Sequence[int]) -> None:
        """Make tables for regions at ``addresses``, unless those in hand are of the same."""
        if addresses is not self._addresses and tuple(addresses) != self._addresses:
            with torch.cuda.device(self._device):
                self._digest = LayoutDigest(self._manifest, self._layout, addresses, self._device)
            self._addresses = tuple(addresses)

    def take(self, addresses: Sequence[int], deadline: Deadline) -> npt.NDArray[np.uint64]:
        """The digests of all rows, ``uint64[rows]``, of what this process has written on the device by now, in whatever stream.

        Raises :class:`~weightsync.errors.DeadlineExceeded`, or what the device reports as a TransportError.
        """
        wait_until_idle(self._device, deadline, f"what is queued on {self._device} before its digests")
        self.build(addresses)
        with torch.cuda.device(self._device):
            self._digest.launch()
            wait_for_device(self._device, deadline, f"taking digests on {self._device}")
            return self._digest.taken()

    def launch(self, first: int, end: int) -> None:
        """Begin to digest rows ``first <= row < end`` in the device's current stream, with the tables in hand."""
        self._digest.launch(first, end)

    def taken(self) -> npt.NDArray[np.uint64]:
        """The digests of all rows that were launched; waits for the device's current stream."""
        with torch.cuda.device(self._device):
            return self._digest.taken()

    @property
    def table_bytes(self) -> int:
        """Device memory that the tables take."""
        return self._digest.table_bytes
