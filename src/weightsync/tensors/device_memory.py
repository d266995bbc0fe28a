"""Shards in device memory: their device, their layout in place, and their digests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.model import Layout, Manifest
from weightsync.tensors.copies import digest_memory
from weightsync.tensors.cuda.digest import LayoutDigest
from weightsync.tensors.cuda.waiting import wait_for_device, wait_until_idle
from weightsync.tensors.digest import PUBLIC, DigestConstants
from weightsync.tensors.memory_layout import layout_in_place
from weightsync.tensors.shards import Shard

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def device_of(shards: Sequence[Shard]) -> torch.device | None:
    """Return the device that holds all of ``shards`` (the CPU if they are empty); ``None`` if there are several."""
    devices = {shard.tensor.device for shard in shards if shard.tensor.numel()}
    if len(devices) > 1:
        return None
    return devices.pop() if devices else torch.device("cpu")


def wait_for_devices(shards: Sequence[Shard], deadline: Deadline) -> None:
    """Wait for all work that this process has queued, in any stream, on the CUDA devices that hold ``shards``.

    Raises:
        DeadlineExceeded: ``deadline`` passed.
        TransportError: A device reported an error.
    """
    for device in {shard.tensor.device for shard in shards}:
        if device.type == "cuda":
            wait_until_idle(device, deadline, f"waiting for work that this rank has queued on {device}")


def forms_of(tensors: Sequence[torch.Tensor]) -> list[Form]:
    """Shape, strides, dtype and device of each tensor: all that determines how its memory is read, except the address."""
    return [(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]


def layout_by_shard(manifest: Manifest, shards: Sequence[Shard]) -> Layout:
    """Layout of ``shards`` (in manifest order) in place, with one region for each shard.

    So the layout stays the same, and plans stay valid, when a shard moves to other memory.

    Raises:
        LayoutError: A shard cannot be read in place: its dtype differs from the manifest's, or it is an expanded tensor.
    """
    layout, _ = layout_in_place(manifest, shards, block_bytes=None)
    sizes = layout.ends(manifest) - layout.offset
    return Layout(
        manifest,
        layout.tensor,
        layout.starts,
        layout.stops,
        np.arange(len(layout), dtype=np.int32),
        np.zeros(len(layout), np.int64),
        layout.strides,
        tuple(sizes.tolist()),
    )


class DeviceDigest:
    """Digests of all rows of ``layout`` in CUDA memory, wherever its regions are at the time.

    Tables are built on the first use of an address, and again when addresses change. Not thread-safe.
    """

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        self._manifest, self._layout, self._device = manifest, layout, device
        self._addresses: tuple[int, ...] | None = None
        self._digest: LayoutDigest

    def build(self, addresses: Sequence[int]) -> None:
        """Build tables for regions at ``addresses``, unless the current tables are for the same."""
        if addresses is not self._addresses and tuple(addresses) != self._addresses:
            with torch.cuda.device(self._device):
                self._digest = LayoutDigest(self._manifest, self._layout, addresses, self._device)
            self._addresses = tuple(addresses)

    def take(self, addresses: Sequence[int], deadline: Deadline, constants: DigestConstants = PUBLIC) -> UInt64:
        """Digests of all rows, ``uint64[rows]``, after all work that this process has queued on the device, in any stream.

        Raises:
            DeadlineExceeded: ``deadline`` passed.
            TransportError: The device reported an error.
        """
        wait_until_idle(self._device, deadline, f"waiting for work queued on {self._device} before digesting")
        self.build(addresses)
        with torch.cuda.device(self._device):
            self._digest.launch(constants=constants)
            wait_for_device(self._device, deadline, f"digesting on {self._device}")
            return self._digest.taken()

    def launch(self, first: int, end: int, constants: DigestConstants = PUBLIC) -> None:
        """Start to digest rows ``first <= row < end`` in the device's current stream, with the current tables."""
        self._digest.launch(first, end, constants)

    def taken(self) -> UInt64:
        """Digests of all launched rows. Waits for the device's current stream."""
        with torch.cuda.device(self._device):
            return self._digest.taken()


def digest_sums(manifest: Manifest, shards: Sequence[Shard], deadline: Deadline) -> UInt64:
    """Digest what memory holds now: for each tensor of ``manifest`` the sum of its ``shards``, which are on one device.

    Raises:
        LayoutError: A shard's memory has another dtype or shape than ``manifest`` says.
        DeadlineExceeded: ``deadline`` passed.
        TransportError: The device reported an error.
    """
    layout, addresses = layout_in_place(manifest, shards, block_bytes=None)
    device, sums = device_of(shards), np.zeros(len(manifest), np.uint64)
    if device is not None and device.type == "cuda":
        rows = DeviceDigest(manifest, layout, device).take(addresses, deadline)
    else:
        rows = digest_memory(manifest, layout, addresses)
    np.add.at(sums, layout.tensor, rows)
    return sums


_LEFT_BYTES = 1 << 30  # of a device's memory: for the trainer


def room_for_copy(nbytes: int, device: torch.device) -> str | None:
    """Why ``device`` has no room for a copy of ``nbytes``, or ``None`` if it has."""
    free, _ = torch.cuda.mem_get_info(device)
    if free >= nbytes + _LEFT_BYTES:
        return None
    return f"{device} has {free:,} bytes free, and a copy of this rank's shards takes {nbytes:,} and leaves {_LEFT_BYTES:,}"
