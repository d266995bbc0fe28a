"""Rollout controller: admits tasks by staleness, distributes them over replicas, and returns full batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from weightsync.config import ClientSettings
from weightsync.coordinator.status import Status
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, PeerLost, VersionError
from weightsync.model import FIRST_EPOCH
from weightsync.server.watch import Watch
from weightsync_rollouts.generation import Generation
from weightsync_rollouts.routing import Replicas, Urls
from weightsync_rollouts.samples import Chunk, FinishReason, Sample, Sampling
from weightsync_rollouts.staleness import Admission

_log = logging.getLogger(__name__.replace("_", ".", 1))  # below weightsync, whose level and handlers it has

T = TypeVar("T")

Generate = Callable[[Sequence[int], Sampling], Awaitable[Sample]]
"""Function that a task calls with a prompt (token ids) and sampling parameters. Returns the sample."""
Task = Callable[[Generate], Awaitable[T | None]]
"""One rollout: generates any number of samples and returns the value for the trainer, or ``None`` to reject the rollout."""

_CLOSE_SECONDS = 10.0


class RolloutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a controller.

    Raises:
        ConfigurationError: The values admit no rollout.
    """

    batch: int
    """Rollouts in a batch, from which the trainer makes one version."""
    max_staleness: int = 1
    """Staleness bound (eta): most versions by which a rollout's first token may be older than its consumer; 0 is on-policy."""
    max_concurrent: int = 64
    """Most rollouts that run at the same time."""
    task_seconds: float = 600.0
    """Time limit of one rollout in seconds, including its waits. A rollout that exceeds it is cancelled, also on its replica."""
    max_age: int | None = None
    """Drop a finished rollout if its oldest token is more than this many versions older than the trainer; ``None`` keeps all."""

    def __post_init__(self) -> None:
        """Check the values that :class:`~weightsync_rollouts.staleness.Admission` does not check."""
        if self.task_seconds <= 0 or (self.max_age is not None and self.max_age < 0):
            raise ConfigurationError(f"task_seconds must be positive and max_age not negative: {self.task_seconds}, {self.max_age}")


@dataclass(frozen=True)
class Rollout(Generic[T]):
    """One accepted rollout."""

    number: int
    """Position in the order of admission."""
    value: T
    """Value that the task returned."""
    samples: tuple[Sample, ...]
    """All samples that the task generated."""
    seconds: float
    """Duration of the task."""

    @property
    def oldest_first(self) -> tuple[int, int] | None:
        """Epoch and number of the oldest version among its tokens; ``None`` without tokens."""
        return min((sample.oldest_first for sample in self.samples if sample.oldest_first is not None), default=None)

    @property
    def oldest(self) -> int | None:
        """Number of the oldest version among its tokens; ``None`` without tokens."""
        return None if self.oldest_first is None else self.oldest_first[1]

    def age(self, version: int) -> int:
        """Return the number of versions by which its oldest token is older than ``version``."""
        return 0 if self.oldest is None else version - self.oldest


@dataclass(frozen=True)
class Counts:
    """Counters of a controller."""

    version: int | None
    waiting: int
    running: int
    accepted: int
    ready: int
    rejected: int
    """Rollouts whose task returned ``None``."""
    timed_out: int
    too_old: int
    interruptions: int
    paused: bool
    replicas: dict[str, int]
    """Running requests by replica."""


class RolloutController(Generic[T]):
    """Runs tasks on one event loop. Use it on that loop, in an ``async with``.

    :class:`~weightsync_rollouts.blocking.Rollouts` offers the same to code without an event loop.

    Args:
        settings: The settings.
        generation: Client for the replicas' servers.
        urls: URL at which each replica generates: a mapping, or a function of its name.
        coordinator: The coordinator, which pushes the states and versions of replicas and the trainer's version. Without it, pass
            these to :attr:`replicas` and :meth:`publish`.

    ::

        async with RolloutController(RolloutSettings(batch=32), VllmTokens(), urls, coordinator=ClientSettings.load()) as
        rollouts:
            rollouts.feed(make_tasks(prompts))
            batch = await rollouts.batch(timeout=600)
    """

    def __init__(
        self, settings: RolloutSettings, generation: Generation, urls: Urls, *, coordinator: ClientSettings | None = None
    ) -> None:
        self.settings = settings
        self.admission = Admission(settings.batch, settings.max_staleness, settings.max_concurrent)
        self.replicas = Replicas(urls, self._pump)
        self.on_ready: Callable[[Rollout[T]], None] = lambda rollout: None
        """Called with each accepted rollout, for example to forward completions."""
        self._generation, self._coordinator = generation, coordinator
        self._watch: Watch | None = None
        self._waiting: deque[Task[T]] = deque()
        self._sources: deque[Iterator[Task[T]]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._ready: list[Rollout[T]] = []
        self._pending: deque[asyncio.Future[list[Rollout[T]]]] = deque()
        self._error: BaseException | None = None
        self._consumer: int | None = None
        self._epoch = FIRST_EPOCH
        self._paused = self._number = self._rejected = self._timed_out = self._too_old = self._interruptions = 0
        self._pumping = self._closed = False

    async def __aenter__(self) -> Self:
        if self._coordinator is not None:
            self._watch = Watch(self._coordinator, self._status_changed, self.replicas.pausing)
            try:
                await self._watch.started(self._coordinator.timeouts.connect)
            except BaseException:
                await self.aclose()
                raise
            self._watch.ended.add_done_callback(self._watch_ended)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel all tasks and their requests, and close connections. Idempotent."""
        self._closed = True
        if self._watch is not None:
            await self._watch.aclose()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CLOSE_SECONDS)
        self.replicas.close()
        self._fail(Aborted("the rollout controller was closed"))
        await self._generation.aclose()

    def submit(self, task: Task[T]) -> None:
        """Queue ``task``, which starts when admission allows it."""
        self._check_open()
        self._waiting.append(task)
        self._pump()

    def feed(self, tasks: Iterable[Task[T]]) -> None:
        """Draw tasks from ``tasks`` one at a time, each when admission allows it to start. The iterable may be infinite."""
        self._check_open()
        self._sources.append(iter(tasks))
        self._pump()

    def publish(self, version: int) -> None:
        """Report that the trainer published ``version``. A coordinator, if given, reports it already."""
        self.admission.publish(version)
        self._drop_old()
        self._deliver()
        self._pump()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Admit no rollouts inside the context. Running rollouts continue. Contexts may be nested.

        Rounds do not need this: replicas report their own state changes.
        """
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """Admit no rollouts until :meth:`resume` has been called as often."""
        self._paused += 1

    def resume(self) -> None:
        """Undo one :meth:`pause`.

        Raises:
            ConfigurationError: The controller is not paused.
        """
        if not self._paused:
            raise ConfigurationError("this rollout controller is not paused")
        self._paused -= 1
        self._pump()

    async def batch(self, timeout: float, version: int | None = None) -> list[Rollout[T]]:
        """Wait for the next ``settings.batch`` rollouts and return them in the order of their completion.

        Args:
            timeout: Seconds to wait.
            version: The trainer's version, to which ``max_age`` applies. Needed if the trainer continues before its publication
                is served (``publish_async``). By default the last served version.

        Raises:
            DeadlineExceeded: ``timeout`` passed. No rollout is lost, so the call may be repeated.
            Aborted: No task is left to fill a batch, or the controller was closed.
            Exception: A task raised it.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._check_open()
        self._consumer = version
        self._drop_old()
        self._pump()
        pending: asyncio.Future[list[Rollout[T]]] = asyncio.get_running_loop().create_future()
        self._pending.append(pending)
        self._deliver()
        self._fail_if_exhausted()
        try:
            await asyncio.wait([pending], timeout=timeout)
        except asyncio.CancelledError:
            if pending.done() and not pending.cancelled() and pending.exception() is None:
                self._ready[:0] = pending.result()
            raise
        finally:
            if pending in self._pending:
                self._pending.remove(pending)
        if not pending.done():
            raise DeadlineExceeded(
                f"{len(self._ready)} of {self.settings.batch} rollouts were ready within {timeout:g} s: {self.counts()}"
            )
        return pending.result()

    def counts(self) -> Counts:
        """Return the current counters."""
        return Counts(
            version=self.admission.version,
            waiting=len(self._waiting),
            running=self.admission.running,
            accepted=self.admission.accepted,
            ready=len(self._ready),
            rejected=self._rejected,
            timed_out=self._timed_out,
            too_old=self._too_old,
            interruptions=self._interruptions,
            paused=bool(self._paused),
            replicas=self.replicas.running(),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise Aborted("the rollout controller is closed")

    def _status_changed(self, status: Status) -> None:
        """Apply a coordinator status. Admission uses the oldest version that a new request may meet.

        The trainer's last version may be newer, because replicas install it one after another.
        """
        if status.last >= 0 and status.epoch > self._epoch:
            self._begin_epoch(status.epoch)
        known = self.admission.version
        self.replicas.oldest = max(status.last - self.settings.max_staleness, -1 if known is None else known)
        self.replicas.apply(status)
        if status.last < 0:
            return
        self.admission.begin(status.last)
        served = self.replicas.served
        try:
            if status.epoch < self._epoch:
                raise VersionError(
                    f"the trainer's epoch decreased from {self._epoch} to {status.epoch}: start a new rollout controller"
                )
            if known is not None and status.last < known:
                self.publish(status.last)
            elif known is None or (served is not None and served > known):
                self.publish(status.last if served is None else served)
        except VersionError as error:
            self._fail(error)

    def _begin_epoch(self, epoch: int) -> None:
        """Start a new epoch, because the trainer restarted from a checkpoint. Drop older samples and restart the counts."""
        self._epoch = self.replicas.epoch = epoch
        self._consumer = None
        self._drop_old()
        self.admission.restart()

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise ``error`` in all pending calls of :meth:`batch`; without one, in the next call."""
        if not self._pending:
            self._error = error
        while self._pending:
            pending = self._pending.popleft()
            if not pending.done():
                pending.set_exception(error)

    def _next(self) -> Task[T] | None:
        if self._waiting:
            return self._waiting.popleft()
        while self._sources:
            try:
                return next(self._sources[0])
            except StopIteration:
                self._sources.popleft()
        return None

    def _pump(self) -> None:
        """Start all tasks that admission allows. Called whenever something changes on which admission depends."""
        if self._pumping or self._closed:  # a source may call submit(), and replicas may change while tasks start
            return
        self._pumping = True
        try:
            while not self._paused and self.admission.capacity > 0 and self.replicas.routable:
                task = self._next()
                if task is None:
                    break
                self.admission.start()
                self._number += 1
                running = asyncio.get_running_loop().create_task(self._run(task, self._number), name=f"rollout {self._number}")
                self._running.add(running)
                running.add_done_callback(self._ended)
        finally:
            self._pumping = False

    def _ended(self, running: asyncio.Task[None]) -> None:
        self._running.discard(running)
        self._pump()
        self._fail_if_exhausted()

    def _fail_if_exhausted(self) -> None:
        if self._pending and not (self._running or self._waiting or self._sources or len(self._ready) >= self.settings.batch):
            self._fail(Aborted(f"no tasks are left, but only {len(self._ready)} of {self.settings.batch} rollouts are ready"))

    async def _run(self, task: Task[T], number: int) -> None:
        began, samples, value = time.monotonic(), list[Sample](), None
        accepted = False
        try:
            async with asyncio.timeout(self.settings.task_seconds) as bound:
                value = await task(self._generate_for(samples))
            if value is None:
                self._rejected += 1
            else:
                accepted = True
        except TimeoutError as error:
            if bound.expired():
                self._timed_out += 1
                _log.warning("rollout %d exceeded its time limit of %g s and was cancelled", number, self.settings.task_seconds)
            else:  # raised by the task itself
                self._fail(error)
        except Exception as error:  # noqa: BLE001 - raised from batch()
            self._fail(error)
        finally:
            self.admission.end(accepted)
        if accepted and value is not None:
            rollout = Rollout(number, value, tuple(samples), time.monotonic() - began)
            self._ready.append(rollout)
            self._drop_old()
            self.on_ready(rollout)
            self._deliver()

    def _drop_old(self) -> None:
        known = [version for version in (self.admission.version, self._consumer) if version is not None]
        most = self.settings.max_age
        young = [rollout for rollout in self._ready if rollout.oldest_first is None or rollout.oldest_first[0] >= self._epoch]
        if known and most is not None:
            version = max(known)
            young = [rollout for rollout in young if rollout.age(version) <= most]
        dropped = len(self._ready) - len(young)
        if dropped:
            self._ready, self._too_old = young, self._too_old + dropped
            self.admission.drop(dropped)

    def _deliver(self) -> None:
        while self._pending and len(self._ready) >= self.settings.batch:
            pending = self._pending.popleft()
            if not pending.done():
                batch, self._ready = self._ready[: self.settings.batch], self._ready[self.settings.batch :]
                pending.set_result(batch)

    def _generate_for(self, samples: list[Sample]) -> Generate:
        async def generate(prompt: Sequence[int], sampling: Sampling) -> Sample:
            sample = Sample(tuple(prompt))
            samples.append(sample)
            while not await self._request(sample, sampling):
                sample.interruptions += 1
                self._interruptions += 1
            return sample

        return generate

    async def _request(self, sample: Sample, sampling: Sampling) -> bool:
        """Request the rest of ``sample``. Returns whether the sample is complete."""
        chunks: list[Chunk] = []
        finish: FinishReason = "abort"
        request_sampling = (
            sampling if sampling.seed is None else msgspec.structs.replace(sampling, seed=sampling.seed + len(sample.tokens))
        )
        budget = sampling.max_tokens - len(sample.tokens)
        async with self.replicas.lease() as lease:
            try:
                stream = self._generation.stream(lease.url, [*sample.prompt, *sample.tokens], budget, request_sampling)
                async with aclosing(stream):
                    async for chunk in stream:
                        chunks.append(chunk)
                        finish = chunk.finish_reason or finish
            except PeerLost as error:
                finish = "abort"
                _log.info("a request to %s was interrupted: %s", lease.name, error)
            lost = sample.lost_tokens
            sample.keep(lease.name, chunks, lease.epoch)
            if finish != "abort" and sample.lost_tokens > lost:
                finish = "abort"
                _log.warning("%s returned tokens without their version; they are dropped", lease.name)
            if len(sample.tokens) >= sampling.max_tokens:
                finish = "length" if finish == "abort" else finish
            if sample.tokens and sample.tokens[-1] in sampling.stop_token_ids:
                finish = "stop"
            lease.cut = finish == "abort"
        sample.finish_reason = finish
        return finish != "abort"
