"""The rollout controller: admits tasks by staleness, spreads them over replicas, and hands out full batches."""

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
from weightsync.rollouts.generation import Generation
from weightsync.rollouts.replicas import Replicas, Urls
from weightsync.rollouts.samples import Chunk, FinishReason, Sample, Sampling
from weightsync.rollouts.staleness import Admission
from weightsync.server.watch import Watch

__all__ = ["Counts", "Generate", "Rollout", "RolloutController", "RolloutSettings", "Task"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

Generate = Callable[[Sequence[int], Sampling], Awaitable[Sample]]
"""Gives a task the answer to a prompt (token numbers)."""
Task = Callable[[Generate], Awaitable[T | None]]
"""One rollout: asks for as many samples as it likes and returns what the trainer shall have, or ``None`` to reject it."""

_CLOSE_SECONDS = 10.0


class RolloutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the controller admits. Raises :class:`~weightsync.errors.ConfigurationError` for values that admit nothing."""

    batch: int
    """Rollouts in a batch: what the trainer takes to make one version."""
    max_staleness: int = 1
    """Versions by which a rollout's first token may be older than the trainer that consumes it (eta). 0: on-policy."""
    max_concurrent: int = 64
    """Rollouts under way at one time."""
    task_seconds: float = 600.0
    """For one rollout, its waits included; then it is cancelled on its replica, and its slot is free."""
    max_age: int | None = None
    """Drop a finished rollout if its oldest token is older than the trainer by more versions than this. ``None``: keep all."""

    def __post_init__(self) -> None:
        """Check what :class:`~weightsync.rollouts.staleness.Admission` does not."""
        if self.task_seconds <= 0 or (self.max_age is not None and self.max_age < 0):
            raise ConfigurationError(f"task_seconds is positive and max_age at least 0, not {self.task_seconds}, {self.max_age}")


@dataclass(frozen=True)
class Rollout(Generic[T]):
    """One accepted rollout."""

    number: int
    """In the order of admission."""
    value: T
    """What the task returned."""
    samples: tuple[Sample, ...]
    """Every sample that it asked for."""
    seconds: float

    @property
    def oldest_first(self) -> tuple[int, int] | None:
        """Epoch and number of the oldest version of any of its tokens."""
        return min((sample.oldest_first for sample in self.samples if sample.oldest_first is not None), default=None)

    @property
    def oldest(self) -> int | None:
        """The number of the oldest version of any of its tokens."""
        return None if self.oldest_first is None else self.oldest_first[1]

    def age(self, version: int) -> int:
        """By how many versions its oldest token is behind ``version``."""
        return 0 if self.oldest is None else version - self.oldest


@dataclass(frozen=True)
class Counts:
    """Where a controller stands."""

    version: int | None
    waiting: int
    running: int
    accepted: int
    ready: int
    rejected: int
    """By their own task."""
    timed_out: int
    too_old: int
    interruptions: int
    paused: bool
    replicas: dict[str, int]
    """Requests under way, by replica."""


class RolloutController(Generic[T]):
    """Runs tasks on one event loop. Made and used on that loop; from a thread use :class:`~weightsync.rollouts.blocking.Rollouts`.

    ``urls`` says where each replica generates (a mapping, or a function of its name). The replicas' states, their versions and the
    trainer's version come from the coordinator, pushed, if ``coordinator`` is given; without it, hand them to :attr:`replicas` and
    :meth:`publish`. Use it in an ``async with``.

    ::

        async with RolloutController(RolloutSettings(batch=32), VllmTokens(), urls, coordinator=ClientSettings.load()) as rollouts:
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
        """Called for each accepted rollout, for who pushes completions on."""
        self._generation, self._coordinator = generation, coordinator
        self._watch: Watch | None = None
        self._waiting: deque[Task[T]] = deque()
        self._sources: deque[Iterator[Task[T]]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._ready: list[Rollout[T]] = []
        self._asking: deque[asyncio.Future[list[Rollout[T]]]] = deque()
        self._error: BaseException | None = None
        self._consumer: int | None = None
        self._epoch = FIRST_EPOCH
        self._paused = self._number = self._rejected = self._timed_out = self._too_old = self._interruptions = 0
        self._pumping = self._closed = False

    async def __aenter__(self) -> Self:
        if self._coordinator is not None:
            self._watch = Watch(self._coordinator, self._told, self.replicas.pausing)
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
        """Cancel everything, also on the replicas, and close connections. Safe twice."""
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
        """Run ``task`` as soon as it may start."""
        self._check_open()
        self._waiting.append(task)
        self._pump()

    def feed(self, tasks: Iterable[Task[T]]) -> None:
        """Take tasks from here, one at a time and only when one may start: an endless stream of prompts is fine."""
        self._check_open()
        self._sources.append(iter(tasks))
        self._pump()

    def publish(self, version: int) -> None:
        """The trainer published ``version``. Not needed where the coordinator says so."""
        self.admission.publish(version)
        self._drop_old()
        self._deliver()
        self._pump()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Admit nothing inside; what runs goes on. May be nested. Rounds need it not: replicas say by themselves when they move."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """Admit nothing until as many :meth:`resume`."""
        self._paused += 1

    def resume(self) -> None:
        """Take one :meth:`pause` back. Raises :class:`~weightsync.errors.ConfigurationError` if there was none."""
        if not self._paused:
            raise ConfigurationError("this rollout controller is not paused")
        self._paused -= 1
        self._pump()

    async def batch(self, timeout: float, version: int | None = None) -> list[Rollout[T]]:
        """The next ``settings.batch`` rollouts, in the order of their completion, as soon as they are there.

        ``version`` is the trainer's own, by which ``max_age`` counts. Give it where the trainer goes on before its publication is
        served (``publish_async``); without it the last version that is served counts.

        Raises :class:`~weightsync.errors.DeadlineExceeded` (nothing is lost: ask again), the error of a task that raised,
        :class:`~weightsync.errors.Aborted` if no task is left to fill a batch, or when the controller is closed.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._check_open()
        self._consumer = version
        self._drop_old()
        self._pump()
        asking: asyncio.Future[list[Rollout[T]]] = asyncio.get_running_loop().create_future()
        self._asking.append(asking)
        self._deliver()
        self._look_for_an_end()
        try:
            await asyncio.wait([asking], timeout=timeout)
        except asyncio.CancelledError:
            if asking.done() and not asking.cancelled() and asking.exception() is None:
                self._ready[:0] = asking.result()
            raise
        finally:
            if asking in self._asking:
                self._asking.remove(asking)
        if not asking.done():
            raise DeadlineExceeded(
                f"{len(self._ready)} of {self.settings.batch} rollouts were ready within {timeout:g} s: {self.counts()}"
            )
        return asking.result()

    def counts(self) -> Counts:
        """Where it stands."""
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

    # What happens.

    def _check_open(self) -> None:
        if self._closed:
            raise Aborted("the rollout controller is closed")

    def _told(self, status: Status) -> None:
        """What starts now is made by the oldest weights that requests may go to, so these are what admission counts from.

        The trainer's last version may be newer: replicas take it one after another, and serve the one before until then.
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
                    f"the trainer went back from epoch {self._epoch} to {status.epoch}: start a new rollout controller"
                )
            if known is not None and status.last < known:
                self.publish(status.last)
            elif known is None or (served is not None and served > known):
                self.publish(status.last if served is None else served)
        except VersionError as error:
            self._fail(error)

    def _begin_epoch(self, epoch: int) -> None:
        """The trainer started again from an earlier checkpoint: what older epochs made is not used, and counting begins anew."""
        self._epoch = self.replicas.epoch = epoch
        self._consumer = None
        self._drop_old()
        self.admission.restart()

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Whoever asks for a batch is told; if nobody does, whoever asks next."""
        if not self._asking:
            self._error = error
        while self._asking:
            asking = self._asking.popleft()
            if not asking.done():
                asking.set_exception(error)

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
        """Start what may start. Called whenever something changed that admission depends on, and only then."""
        if self._pumping or self._closed:  # a source that submits, or replicas that change while tasks start
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
        self._look_for_an_end()

    def _look_for_an_end(self) -> None:
        if self._asking and not (self._running or self._waiting or self._sources or len(self._ready) >= self.settings.batch):
            self._fail(Aborted(f"no task is left, and only {len(self._ready)} of {self.settings.batch} rollouts are ready"))

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
                _log.warning("rollout %d was cancelled after %g s", number, self.settings.task_seconds)
            else:  # the task's own
                self._fail(error)
        except Exception as error:  # noqa: BLE001 - the trainer's to see, from batch()
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
        while self._asking and len(self._ready) >= self.settings.batch:
            asking = self._asking.popleft()
            if not asking.done():
                batch, self._ready = self._ready[: self.settings.batch], self._ready[self.settings.batch :]
                asking.set_result(batch)

    def _generate_for(self, samples: list[Sample]) -> Generate:
        async def generate(prompt: Sequence[int], sampling: Sampling) -> Sample:
            sample = Sample(tuple(prompt))
            samples.append(sample)
            while not await self._ask(sample, sampling):
                sample.interruptions += 1
                self._interruptions += 1
            return sample

        return generate

    async def _ask(self, sample: Sample, sampling: Sampling) -> bool:
        """One request for the rest of ``sample``; returns whether it is whole."""
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
                _log.info("a request at %s was cut off: %s", lease.name, error)
            lost = sample.lost_tokens
            sample.keep(lease.name, chunks, lease.epoch)
            if finish != "abort" and sample.lost_tokens > lost:
                finish = "abort"
                _log.warning("%s made tokens and does not say with which version", lease.name)
            if len(sample.tokens) >= sampling.max_tokens:
                finish = "length" if finish == "abort" else finish
            if sample.tokens and sample.tokens[-1] in sampling.stop_token_ids:
                finish = "stop"
            lease.cut = finish == "abort"
        sample.finish_reason = finish
        return finish != "abort"
