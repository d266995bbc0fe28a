"""A trainer rank's part of a round: place the shards on a shelf that engine ranks can reach."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from weightsync.errors import Aborted
from weightsync.messages import Body, Done, Host, Offer, Place, Placed
from weightsync.model import Layout, Manifest
from weightsync.tensors.memory import packed_layout
from weightsync.tensors.placing import Placer
from weightsync.tensors.shards import shards_of
from weightsync.transports.base import Owner, Scheme
from weightsync.transports.shelf import Shelf

__all__ = ["TrainerRole"]


class TrainerRole:
    """Holds the shelf of one trainer rank and serves it by every scheme given.

    ``state`` is a module or a state dict whose tensors are plain (held whole) or DTensors. Costs one copy of this rank's shards
    in host memory, in the published dtype, for as long as the role lives. Raises what
    :func:`~weightsync.tensors.shards.shards_of` and :class:`~weightsync.transports.shelf.Shelf` raise.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module,
        schemes: Sequence[Scheme],
        key: bytes,
        here: Host,
        *,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        buffers: bool = False,
    ) -> None:
        self.manifest: Manifest
        self.manifest, self._shards = shards_of(state, dtype=dtype, buffers=buffers)
        self.layout: Layout = packed_layout(self.manifest, self._shards)
        self.key = key
        self._stop = np.zeros(1, np.int8)
        self._busy = threading.Lock()
        self._armed: int | None = None
        self._last: Placed | None = None
        self._placed = threading.Event()
        with ExitStack() as owned:
            self.shelf = Shelf(self.layout.regions[0] if self.layout.regions else 0, self.layout.digest)
            owned.callback(self.shelf.close)
            self._placer = Placer(self.manifest, self._shards, self.layout, self.shelf.address)
            self._owners: list[Owner] = []
            for scheme in schemes:
                owner = scheme.serve(self.shelf, key, here)
                owned.callback(owner.close)
                self._owners.append(owner)
            self._owned = owned.pop_all()

    @property
    def offers(self) -> tuple[Offer, ...]:
        """How engine ranks reach the shelf, in the order of the schemes given."""
        return tuple(owner.offer for owner in self._owners)

    def arm(self, number: int) -> threading.Event:
        """Allow version ``number`` to be placed: the trainer's thread stands still in ``publish`` from here to :meth:`disarm`.

        The event is set when the copy is complete, so that the trainer may change its memory again.
        """
        self._stop[0] = 0
        self._placed = threading.Event()
        self._armed = number
        return self._placed

    def disarm(self) -> None:
        """Stop a placing that runs, and refuse any that comes later. On return nothing reads the trainer's memory any more."""
        self._armed = None
        self._stop[0] = 1
        with self._busy:  # a placing looks at the flag every few hundred KiB, so this is held for a moment at most
            pass

    def handle(self, body: Body, timeout: float) -> Body:
        """Answer a call of the coordinator. Raises :class:`~weightsync.errors.Aborted` when nobody is publishing that number."""
        if isinstance(body, Place):
            return self._place(body.number)
        return Done()

    def _place(self, number: int) -> Placed:
        with self._busy:
            if self._last is not None and self.shelf.version == number:
                return self._last  # asked again, by a coordinator that restarted: a number always means the same bytes
            if self._armed != number:
                raise Aborted(f"this trainer rank is not publishing version {number} (any more)")
            started = time.perf_counter()
            with self.shelf.placing(number):
                digests = self._placer.place(self._stop)
                if self._stop[0]:
                    raise Aborted(f"placing version {number} was aborted by the trainer")
            self._armed = None
            self._last = Placed(digests=digests.astype("<u8").tobytes(), seconds=time.perf_counter() - started)
            self._placed.set()
            return self._last

    def close(self) -> None:
        """Stop serving and free the shelf. Safe twice."""
        self.disarm()
        self._owned.close()
