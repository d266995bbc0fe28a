"""A trainer rank's part of a round: place the shards where engine ranks can reach them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np
import torch

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded, StaleSource
from weightsync.outcome import Latch
from weightsync.protocol.messages import Body, ChangedWords, DigestUnderKey, Done, Place, Placed
from weightsync.publishing.publication import ReaderAccess
from weightsync.publishing.published_shards import PLAIN, PublishedShards, ShardOptions
from weightsync.tensors.digest import DigestConstants
from weightsync.tensors.shards import ShardedState
from weightsync.trainer.maxima_group import MaximaGroup

_PLACING_SECONDS = 60.0


class Placing(Latch):
    """The placing of one call of ``publish()``: allowed, under way, done, or over without.

    ``call`` identifies the call, and ``number`` is the version number that it asked for, ``None`` for any: one ``above`` all that
    earlier calls have placed.
    """

    def __init__(self, call: int, number: int | None, above: int) -> None:
        super().__init__()
        self.call, self.asked, self.above = call, number, above
        self.number: int | None = None
        """The number under which the shards were placed; ``None`` before."""
        self.stop = np.zeros(1, np.int8)
        """``stop[0]`` ends a copy that runs."""


class TrainerRole(PublishedShards):
    """Places the shards of one trainer rank when a publication asks for it, and publishes them as its base class says.

    Without ``seeds``, a version can be read during its publication only, also where the region holds a copy.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState,
        access: ReaderAccess,
        options: ShardOptions = PLAIN,
        *,
        seeds: bool = True,
        ranks: MaximaGroup | None = None,
    ) -> None:
        self._seeds = seeds
        self._stop_digest = np.zeros(1, np.int8)
        self._busy = threading.Lock()
        """Held by the thread that places, and by no other."""
        self._running = Latch()
        """Set while nothing is placed or digested. A new one for each time."""
        self._running.set()
        self._armed: Placing | None = None
        """What may be placed now."""
        self.epoch = 0
        """The epoch in which this rank publishes; 0 before the coordinator has sent it."""
        self.order = 0
        """The highest :attr:`Place.order` that it was sent."""
        self.highest = -1
        """The highest number under which shards were placed."""
        self._last: tuple[int, Placed] | None = None
        """Call and answer of what the region holds."""
        self._ranks = ranks
        """With the other trainer ranks, if weights are quantized."""
        super().__init__(state, access, options, None if ranks is None else ranks.all_max)
        self.release()

    @property
    def live(self) -> bool:
        """Whether nothing can be read any more when a publication is over."""
        return self.in_place or not self._seeds

    def arm(self, call: int, number: int | None) -> Placing:
        """Allow ``call`` to place version ``number`` (``None``: the one that the coordinator chooses), once.

        The trainer's thread stands still in ``publish`` from here to :meth:`disarm`.

        The answer is set when the copy is complete, so that the trainer may change its memory again.
        """
        if self._ranks is not None:
            self._ranks.check()
        self.follow()
        self._armed = placing = Placing(call, number, self.highest)
        self._stop_digest[0] = 1  # a new version must not wait until a digest of the last one is taken
        return placing

    def disarm(self) -> None:
        """Stop a placing that runs, and refuse any that comes later. On return nothing reads the trainer's memory any more.

        Where it is :attr:`live`, a reader whose launch is still running then (its rank did not even answer to quarantine within
        the grace) learns so when it checks, and discards what it has. Takes no lock: a signal handler may raise anywhere in here.
        """
        armed, self._armed = self._armed, None
        self._stop_digest[0] = 1
        if armed is not None:
            armed.stop[0] = 1
        if not self._running.wait(_PLACING_SECONDS):  # a placing looks at the flag every few hundred KiB
            raise DeadlineExceeded(
                f"a placing did not stop within {_PLACING_SECONDS:g} s (a hung device, or a trainer rank that takes no part in the "
                "maxima of quantized weights?): this rank's weights may still be read"
            )
        if self.live:
            self.withdraw()
        self.release()

    def handle(self, body: Body, timeout: float) -> Body:
        """Answer a call of the coordinator. Raises :class:`~weightsync.errors.Aborted` if that number is not being published."""
        if isinstance(body, Place):
            failpoints.reached("trainer.received.place")
            self.epoch, self.order = body.epoch, max(self.order, body.order)
            return self._place(body, Deadline(timeout))
        if isinstance(body, DigestUnderKey):
            return self._digest_under_key(body, Deadline(timeout))
        return Done()

    def _place(self, body: Place, deadline: Deadline) -> Placed:
        with self._busy:
            group = self._ranks if self.quantized is not None and self.quantized.exchanged else None
            if self._last is not None and (self._last[0], self.region.version) == (body.call, body.number):
                if group is not None:  # a rank that failed before may take maxima again
                    group.order = body.order
                    group.give_up()
                return self._last[1]  # asked again, by a coordinator that restarted
            self._running = running = Latch()  # before the look at what is armed: disarm() looks in the other order
            turns = 0
            if self._ranks is not None:
                turns, self._ranks.order = self._ranks.turns, body.order
            try:
                return self._place_armed(self._armed, body, deadline)
            except BaseException:
                if group is not None and group.turns == turns:
                    group.give_up()
                raise
            finally:
                running.set()

    def _place_armed(self, placing: Placing | None, body: Place, deadline: Deadline) -> Placed:
        number = body.number
        wanted = placing is not None and placing.call == body.call and placing.asked in (None, number)
        if placing is None or not wanted or placing.number is not None:
            raise Aborted(f"this trainer rank is not publishing version {number} (any more)")
        failpoints.reached("trainer.place")
        started = time.perf_counter()
        self._last = None
        if self.changes is not None:
            self.changes.wanted = body.bases
        with self.placing(number, placing.stop, deadline) as digests:
            failpoints.reached("trainer.placing")
            if placing.stop[0]:
                raise Aborted(f"placing version {number} was aborted by the trainer")
        changed: tuple[ChangedWords, ...] = ()
        if self.changes is not None:
            self.changes.placed(body.epoch, number)
            changed = self.changes.changed
        placed = Placed(digests=digests.astype("<u8").tobytes(), seconds=time.perf_counter() - started, changed=changed)
        placing.number, self._last, self.highest = number, (body.call, placed), max(self.highest, number)
        placing.set()
        failpoints.reached("trainer.placed")
        return placed

    def _digest_under_key(self, body: DigestUnderKey, deadline: Deadline) -> Placed:
        with self._busy:
            self._running = running = Latch()
            try:
                self._stop_digest[0] = 0  # before the look at what is armed: arm() looks in the other order
                armed = self._armed
                self._require(body, placing=armed is not None and armed.number is None)
                failpoints.reached("trainer.digest")
                started = time.perf_counter()
                digests = self.digests(DigestConstants(body.key), self._stop_digest, deadline)
                self._require(body, placing=False)
                return Placed(digests=digests.astype("<u8").tobytes(), seconds=time.perf_counter() - started)
            finally:
                running.set()

    def _require(self, body: DigestUnderKey, *, placing: bool) -> None:
        if placing or self.epoch != body.epoch or self.region.version != body.number:
            raise StaleSource(f"this trainer rank does not hold version {body.number} of epoch {body.epoch} (any more)")

    def close(self) -> None:
        """Stop serving and free the region. Safe twice."""
        self.disarm()
        super().close()
        if self._ranks is not None:
            self._ranks.close()
