"""Receives a trainer's tensors and yields them to the caller's own loader: an engine rank without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from weightsync.closing import Closeable
from weightsync.config import ClientSettings, Timeouts
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, LoadError, RoundFailed, WeightSyncError
from weightsync.forks import Origin
from weightsync.model import Manifest, Version
from weightsync.transports.base import Transport

Batch = list[tuple[str, torch.Tensor]]

_ANSWER_SECONDS = 2.0


class _Handover(EngineAdapter):
    """Lends each bucket to the consumer, and gets it back when the next one is requested. A stream has one consumer."""

    name = "receiver"

    def __init__(self, device: torch.device | None, timeout: float, manifest: Manifest | None = None) -> None:
        self.takes_any = manifest is None
        self._manifest = Manifest(()) if manifest is None else manifest
        self._device, self._timeout = device, timeout
        self._changed = threading.Condition()
        self._takers = 0  # so far; each has a number
        self._taker = 0  # number of the consumer; 0: none
        self._owner = 0  # who takes the stream that runs
        self._running = False
        self._batch: Batch | None = None
        self._lent = False
        self._stopped: WeightSyncError | None = None
        self._ended: tuple[int, WeightSyncError | None] = 0, None  # whose stream ended last, and how
        self._closed = False

    # The adapter: weightsync's thread.

    def manifest(self) -> Manifest:
        return self._manifest

    def device(self) -> torch.device | None:
        return self._device

    def begin(self) -> None:
        with self._changed:
            self._running, self._owner, self._stopped, self._batch = True, 0, None, None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self._changed:
            if not self._owner:  # waits here and not in begin(), so that no abort is missed: each load() checks for one before
                self._wait(lambda: self._next_taker > 0, "the application did not call receive()")
                self._owner = self._next_taker
            self._batch, self._lent = list(tensors), False
            self._changed.notify_all()
            try:
                self._wait(
                    lambda: self._batch is None or self._taker != self._owner, "the application did not ask for the next batch"
                )
                if self._batch is not None:
                    raise LoadError("the application stopped iterating in the middle of the stream")
            finally:
                self._batch = None

    def resume(self) -> None:
        with self._changed:
            self._running, self._ended = False, (self._owner, None)
            self._changed.notify_all()

    def aborted(self, reason: str) -> None:
        with self._changed:
            waits = self._next_taker or (0 if self._takers else 1)  # the first one may come later than the failure of its stream
            if not self._running and not (reason and waits):
                return  # between two streams
            why = reason or "the connection to the coordinator broke, or it gave the round up"
            self._stopped = RoundFailed(f"this stream did not arrive: {why}")
            owner = self._owner if self._running and self._owner else waits
            if owner:
                self._ended = owner, self._stopped
            self._running = False
            self._changed.notify_all()

    @property
    def _next_taker(self) -> int:
        """The consumer, if its loop may get the next stream: one whose stream has ended may still be busy. 0: none."""
        return 0 if self._taker == self._ended[0] else self._taker

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        done = self._changed.wait_for(lambda: self._closed or self._stopped is not None or ready(), self._timeout)
        if self._closed or self._stopped is not None:
            raise Aborted(str(self._stopped or "this receiver was closed"))
        if not done:
            raise DeadlineExceeded(f"{what} within {self._timeout:g} s")

    # The consumer's side.

    @contextmanager
    def taking(self) -> Iterator[int]:
        """Take the next stream, or the one that waits for a taker, from its beginning to its end. Gives the taker's number."""
        with self._changed:
            if self._taker:
                raise ConfigurationError("this receiver is receiving already: a stream goes to one loop")
            self._takers += 1
            me = self._taker = self._takers
            self._changed.notify_all()
        try:
            yield me
        finally:
            with self._changed:
                self._taker = 0
                self._changed.notify_all()

    def take(self, me: int, deadline: Deadline) -> Batch | None:
        """The next batch, which gives the last one back; ``None`` when the stream was verified and committed."""
        with self._changed:
            mine = self._owner == me
            if mine and self._lent:
                self._batch, self._lent = None, False
                self._changed.notify_all()

            def ready() -> bool:
                news = self._ended[0] == me or self._closed or self._taker != me
                return news or (self._batch is not None and self._owner == me)

            came = self._changed.wait_for(ready, deadline.remaining("waiting for a stream"))
            if self._closed or self._taker != me:
                raise Aborted("this receiver was closed, or its loop was left")
            if not came:
                raise DeadlineExceeded(f"no stream came, or went on, within {deadline.seconds:g} s")
            if self._ended[0] == me:
                error = self._ended[1]
                if error is not None:
                    raise error
                return None
            self._lent = True
            return self._batch

    @property
    def busy(self) -> bool:
        """Whether a stream is being received."""
        with self._changed:
            return self._running

    def close(self) -> None:
        """Nothing is taken any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Receiver(Closeable):
    """Receives the streams of a trainer (:meth:`weightsync.Trainer.publish_stream`) for the caller's own loader.

    For frameworks whose process that gets the weights holds no model, or that load weights in their own way. Takes whatever tensors
    come; with a ``manifest``, what a trainer that publishes a module of these tensors brings: each whole, assembled from the shards
    that the trainer's ranks hold, and under its name in the manifest, not under aliases. Pausing, flushing and resuming an engine
    is the framework's: nothing happens here. Joins the coordinator when it is made, as rank ``rank`` of ``world_size`` (0 of 1) of
    ``replica``; ranks of one replica succeed or fail together. ``device`` is the CUDA device where batches should lie, if trainers
    on this host can be read from there; else they lie in host memory. The other arguments are those of :class:`weightsync.Engine`.
    Close it, or use it in a ``with``.

    Raises what :class:`weightsync.Engine` raises. A trainer that publishes a module refuses receivers without its manifest
    (:class:`~weightsync.errors.ManifestMismatch`).

    ::

        receiver = weightsync.Receiver("rollout-0", coordinator="http://head:7400")
        for batch in receiver.receive():
            loader.load_weights(batch)
    """

    def __init__(
        self,
        replica: str | None = None,
        coordinator: str | None = None,
        *,
        token: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        run: str = "",
        manifest: Manifest | None = None,
        bucket_bytes: int | None = None,
        device: torch.device | str | None = None,
        transports: Sequence[Transport | str] | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._origin = Origin()
        self._timeout = ClientSettings.load(coordinator=coordinator, timeouts=timeouts).timeouts.version
        self._handover = _Handover(None if device is None else torch.device(device), self._timeout, manifest)
        self._engine = Engine(
            self._handover, replica, coordinator, token=token, rank=rank, world_size=world_size, run=run, delivery="streamed",
            bucket_bytes=bucket_bytes, timeouts=timeouts, transports=transports,
        )  # fmt: skip

    @property
    def serving(self) -> Version | None:
        """The version that was received last, verified and committed; ``None`` before the first and while one is received."""
        return self._engine.serving

    def receive(self, timeout: float | None = None) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Iterate over the batches of one publication, which may have begun or not. Tensors are lent until the next batch.

        Ends when all bytes were verified and committed for this replica. Leaving the loop early fails the round for it. The first
        loop also gets the failure of a publication that failed before it; a later one takes the next publication then.

        Args:
            timeout: Seconds until the end of the publication; by default ``timeouts.version``.

        Raises:
            RoundFailed: The publication failed, for this replica or for all.
            DeadlineExceeded: ``timeout`` passed.
            Aborted: The receiver was closed.
            ConfigurationError: Another loop receives, or this is a forked child of the process that made the receiver.
        """
        self._origin.require("this receiver")
        deadline = Deadline(self._timeout if timeout is None else timeout)
        with self._handover.taking() as me:
            while (batch := self._handover.take(me, deadline)) is not None:
                yield batch
                del batch

    async def receive_async(self, timeout: float | None = None) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Iterate as :meth:`receive` does, waiting in threads, so that this object is bound to no event loop."""
        self._origin.require("this receiver")
        deadline = Deadline(self._timeout if timeout is None else timeout)
        with self._handover.taking() as me:
            while (batch := await asyncio.to_thread(self._handover.take, me, deadline)) is not None:
                yield batch
                del batch

    def close(self) -> None:
        """Leave the coordinator; a thread that receives gets :class:`~weightsync.errors.Aborted`. Safe twice.

        In a forked child this does nothing.
        """
        if self._origin.elsewhere:
            return
        if not self._handover.busy:
            self._engine.drain(_ANSWER_SECONDS)  # a loop ends shortly before the coordinator hears of it
        self._handover.close()
        self._engine.close()
