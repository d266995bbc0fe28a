"""A trainer rank's part of a round: place the shards where engine ranks can reach them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded
from weightsync.protocol.messages import Body, Done, Host, Place, Placed
from weightsync.publishing.published_shards import PublishedShards
from weightsync.tensors.shards import DTypes, ShardedState
from weightsync.transports.base import LOOPBACK, Network, Transport

__all__ = ["Placing", "TrainerRole"]

_PLACING_SECONDS = 60.0
_ANY = -1  # any number may be placed


class Placing:
    """The wait for the shards of one publication to be placed, or for its call to end without."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The number under which they were placed; ``None`` before."""
        self._over = threading.Event()

    def set(self) -> None:
        """End the wait. Any thread."""
        self._over.set()

    def wait(self, timeout: float) -> bool:
        """Return whether the wait was over within ``timeout`` seconds."""
        return self._over.wait(timeout)


class TrainerRole(PublishedShards):
    """Places the shards of one trainer rank when a publication asks for it, and publishes them as its base class says.

    Without ``seeds``, a version can be read during its publication only, also where the region holds a copy.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState,
        transports: Sequence[Transport],
        key: bytes,
        local_host: Host,
        *,
        network: Network = LOOPBACK,
        dtype: DTypes = None,
        include_buffers: bool = False,
        seeds: bool = True,
    ) -> None:
        self._seeds = seeds
        self._stop = np.zeros(1, np.int8)
        self._busy = threading.Lock()
        self._armed: int | None = None
        self.epoch = 0
        """The epoch in which this rank publishes; 0 before the coordinator has sent it."""
        self._last: Placed | None = None
        self._placing = Placing()
        super().__init__(state, transports, key, local_host, network=network, dtype=dtype, include_buffers=include_buffers)

    @property
    def live(self) -> bool:
        """Whether nothing can be read any more when a publication is over."""
        return self.in_place or not self._seeds

    def arm(self, number: int | None) -> Placing:
        """Allow version ``number`` to be placed (``None``: the one that the coordinator chooses).

        The trainer's thread stands still in ``publish`` from here to :meth:`disarm`.

        The answer is set when the copy is complete, so that the trainer may change its memory again.
        """
        self.follow()
        self._stop[0] = 0
        self._last = None  # of an earlier attempt at this number, perhaps: a publication means the weights of now
        self._placing = Placing()
        self._armed = _ANY if number is None else number
        return self._placing

    def disarm(self) -> None:
        """Stop a placing that runs, and refuse any that comes later. On return nothing reads the trainer's memory any more.

        Where it is :attr:`live`, a reader whose launch is still running then (its rank did not even answer to quarantine within
        the grace) learns so when it checks, and discards what it has.
        """
        self._armed = None
        self._stop[0] = 1
        if not self._busy.acquire(timeout=_PLACING_SECONDS):  # a placing looks at the flag every few hundred KiB
            raise DeadlineExceeded(
                f"a placing did not stop within {_PLACING_SECONDS:g} s (a hung device?): this rank's weights may still be read"
            )
        try:
            if self.live:
                self.withdraw()
        finally:
            self._busy.release()

    def handle(self, body: Body, timeout: float) -> Body:
        """Answer a call of the coordinator. Raises :class:`~weightsync.errors.Aborted` if that number is not being published."""
        if isinstance(body, Place):
            failpoints.reached("trainer.received.place")
            self.epoch = body.epoch
            return self._place(body.number, Deadline(timeout))
        return Done()

    def _place(self, number: int, deadline: Deadline) -> Placed:
        with self._busy:
            if self._last is not None and self.region.version == number:
                return self._last  # asked again, by a coordinator that restarted: a number always means the same bytes
            if self._armed not in (number, _ANY):
                raise Aborted(f"this trainer rank is not publishing version {number} (any more)")
            failpoints.reached("trainer.place")
            started = time.perf_counter()
            with self.placing(number, self._stop, deadline) as digests:
                failpoints.reached("trainer.placing")
                if self._stop[0]:
                    raise Aborted(f"placing version {number} was aborted by the trainer")
            self._armed, self._placing.number = None, number
            self._last = Placed(digests=digests.astype("<u8").tobytes(), seconds=time.perf_counter() - started)
            self._placing.set()
            failpoints.reached("trainer.placed")
            return self._last

    def close(self) -> None:
        """Stop serving and free the region. Safe twice."""
        self.disarm()
        self._owned.close()
