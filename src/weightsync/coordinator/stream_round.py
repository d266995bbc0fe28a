"""Run one round whose source is a stream: windows go from the trainer's ranks to all replicas in one pass.

::

    trainer rank 0 ─ window 0, 2, 4 ... ┐          ┌─ replica 0: pause ─ window 0, 1, 2 ... ─ verify ─ commit ─ resume
                                        ├─ in order ┤
    trainer rank 1 ─ window 1, 3, 5 ... ┘          └─ replica 1: pause ─ window 0, 1 ✗ quarantine

A rank fills a window again when no replica needs it any more; that is all the backpressure there is. Where readers share a
broadcast, replicas take windows in step, so that none waits at the trainer for one that is still loading. The trainer's ranks go
on to the end of the stream whatever happens to replicas: a failed one needs no more windows. The version exists at the end, when
all digests are known. An engine pauses when the first window is there: a stream that fails before it changes nothing. A receiver
pauses at once: it serves nothing itself, and a failure must reach it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np

from weightsync import failpoints
from weightsync.closing import OnFailure
from weightsync.coordinator.agreement import open_stream, wait_for_background, window_bytes_of
from weightsync.coordinator.publications import Placement
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline, bounded, on_all
from weightsync.coordinator.ranks import TrainerRank, check_digests, unpacked
from weightsync.coordinator.report import Report
from weightsync.coordinator.round import conduct, drained, finish, out_of_service, pause
from weightsync.coordinator.round_context import Engines, Placing, RoundContext
from weightsync.errors import ConfigurationError, PeerLost, ProtocolError, VerificationError, WeightSyncError
from weightsync.model import Version, fold
from weightsync.model.window import KnownWindows, Measured, StreamedTensors, is_sampled
from weightsync.protocol.messages import EndStream, Moved, MoveWindow, PlaceWindow, RoundResult, WindowMoved, WindowPlaced

_MOST_PARTS = 1 << 19  # of a stream: the coordinator keeps each until the end, in half a kilobyte
_LAST_SECONDS = 1.0
_DIFFERENT = "the trainer's ranks did not iterate over the same tensors: every rank's iterator yields all of them, in one order"


class WindowFlow:
    """Windows on their way: who has placed which, and which replicas still need them. Nothing is polled."""

    def __init__(self, replicas: Iterable[str], known: KnownWindows[Measured], *, in_step: bool = False) -> None:
        self.placed: list[WindowPlaced] = []
        """Windows in order. Their number in the stream is their index."""
        self.tensors = StreamedTensors()
        self._parts = 0
        self._known = known
        self._early: dict[int, WindowPlaced] = {}
        self._needed = dict.fromkeys(replicas, -1)  # before a replica is ready for window 0
        self._in_step = in_step
        self._windows: int | None = None
        """All windows of the stream, once a rank has said how many there are."""
        self._news = asyncio.Event()

    @property
    def released(self) -> int:
        """Windows before this one are needed by no replica any more."""
        return max(min(self._needed.values(), default=len(self.placed)), 0)

    @property
    def readers(self) -> int:
        """Replicas that take part and have not failed."""
        return len(self._needed)

    def put(self, number: int, window: WindowPlaced) -> None:
        """Window ``number`` is there; windows of different ranks may come out of order.

        Raises:
            ConfigurationError: Another rank's stream has ended before it, or the stream is too long.
            ManifestMismatch: A tensor came twice.
        """
        if self._beyond(number):
            raise ConfigurationError(_DIFFERENT)
        self._parts += len(window.parts)
        if self._parts > _MOST_PARTS:
            raise ConfigurationError(f"the stream has more than {_MOST_PARTS:,} tensors and parts of tensors: put some together")
        self._early[number] = window
        while (following := self._early.pop(len(self.placed), None)) is not None:
            parts = self._known.get(len(self.placed), following.parts, following.nbytes)
            self.tensors.add_window(parts, np.frombuffer(following.digests, "<u8").tolist())
            self.placed.append(following)
        self._changed()

    def rank_ended(self, windows: int) -> None:
        """A rank says that the stream has so many windows.

        Raises:
            ConfigurationError: Another rank's stream has another number of them.
        """
        if self._windows not in (None, windows):
            raise ConfigurationError(_DIFFERENT)
        self._windows = windows
        self._changed()

    def took(self, replica: str, windows: int) -> None:
        """A replica is ready for window number ``windows``, and needs none before it any more."""
        self._needed[replica] = windows
        self._changed()

    def leave(self, replica: str) -> None:
        """A replica needs no more windows."""
        self._needed.pop(replica, None)
        self._changed()

    async def get(self, number: int, deadline: RoundDeadline) -> WindowPlaced | None:
        """Wait for window ``number``; ``None`` once the stream has ended before it."""
        await self._until(lambda: number < len(self.placed) or self._beyond(number), f"waiting for window {number}", deadline)
        return self.placed[number] if number < len(self.placed) else None

    async def turn(self, number: int, deadline: RoundDeadline) -> None:
        """Wait until every other replica is ready for window ``number`` too, if they take windows in step."""
        if self._in_step:
            what = f"waiting for replicas that have not taken window {number - 1}"
            await self._until(lambda: min(self._needed.values(), default=number) >= number, what, deadline)

    async def room(self, number: int, windows: int, deadline: RoundDeadline) -> None:
        """Wait until the memory of window ``number`` is free, where the trainer's ranks together have ``windows``."""
        reused = number - windows
        what = f"waiting for readers of window {reused}"
        await self._until(lambda: self.released > reused or self._beyond(number), what, deadline)

    def _beyond(self, number: int) -> bool:
        return self._windows is not None and number >= self._windows

    async def _until(self, ready: Callable[[], bool], what: str, deadline: RoundDeadline) -> None:
        while not ready():
            await bounded(what, deadline, self._news.wait())

    def _changed(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def run_stream_round(context: RoundContext) -> RoundResult:
    """Bring every replica of ``context`` to the version that a stream brings, each independently, in one pass.

    Returns:
        The result of the round, with one result for each replica. Failed replicas are results, not errors.

    Raises:
        WeightSyncError: The stream failed, so no version exists. Replicas that had begun to take it are quarantined.
    """
    names = [replica.name for replica in context.replicas]
    limit = context.settings.max_unavailable
    if limit and limit < len(names):
        raise ConfigurationError(
            f"a stream passes once, so all {len(names)} replicas take it together, and at most {limit} may be out of service: "
            "raise or remove max_unavailable"
        )
    offers = [offer for link in context.trainers.values() for offer in link.rank.hello.offers]
    flow = WindowFlow(names, context.publications.windows, in_step=any(offer.traits.shared_fate for offer in offers))
    with OnFailure(context.publications.windows.end, 0):  # those of a stream that failed are not kept for the next one
        return await conduct(context, partial(_place, flow), partial(_update_replica, flow), Report)


# The trainer's side.


async def _place(flow: WindowFlow, context: RoundContext) -> tuple[Placement, float]:
    """Let the trainer's ranks place their windows, to the end of the stream: then its version exists."""
    started, limit = asyncio.get_running_loop().time(), context.deadline
    if not context.trainers:
        raise PeerLost("no trainer rank is connected any more: nothing can be published")
    engines = {member: link for replica in context.replicas for member, link in replica.members().items()}
    window_bytes = window_bytes_of(context.trainers, engines)
    context.publications.clear()
    try:
        async with asyncio.TaskGroup() as group:
            ranks = [
                group.create_task(_place_rank(context, flow, link, rank, window_bytes))
                for rank, link in enumerate(context.trainers.values())
            ]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed.exceptions[0].__cause__
    ends = {(end.windows, end.manifest) for end in (task.result() for task in ranks)}
    if len(ends) > 1:
        raise ConfigurationError(_DIFFERENT)
    [(windows, fingerprint)] = ends
    manifest, totals = flow.tensors.end()
    if windows != len(flow.placed) or fingerprint != manifest.fingerprint or not manifest.nbytes:
        raise ProtocolError(f"the trainer's ranks announced {windows} windows and placed {len(flow.placed)}, or other tensors")
    _check_sample(context, flow, {member: task.result().sample for member, task in zip(context.trainers, ranks, strict=True)})
    version = Version(context.settings.run, context.number, manifest.fingerprint, fold(totals), context.epoch)
    sessions = {member: link.rank.hello.session for member, link in context.trainers.items()}
    placement = Placement(version, totals, sessions, live=True)
    context.publications.hold(placement)
    context.publications.windows.end(windows)
    limit.remaining("ending the stream")
    return placement, asyncio.get_running_loop().time() - started


def _check_sample(context: RoundContext, flow: WindowFlow, samples: Mapping[str, bytes]) -> None:
    """Compare samples of what the ranks hold: each window comes from one rank, so the version of ranks that differ is a mixture.

    Raises:
        VerificationError: Two ranks differ. The message names them and a tensor.
        ProtocolError: A rank sampled other tensors.
    """
    first, *others = samples
    names = list(dict.fromkeys(part.name for window in flow.placed for part in window.parts)) if others else []
    sampled = [name for index, name in enumerate(names) if is_sampled(index, context.number)]
    for member, sample in samples.items():
        if len(sample) != 8 * len(sampled):
            raise ProtocolError(f"{member} sent {len(sample)} bytes of digests of {len(sampled)} sampled tensors")
    digests = {member: np.frombuffer(sample, "<u8") for member, sample in samples.items()}
    for member in others:
        wrong = np.flatnonzero(digests[member] != digests[first])
        if len(wrong):
            raise VerificationError(
                f"{first} and {member} stream different values of {sampled[int(wrong[0])]} ({len(wrong)} of {len(sampled)} "
                "compared tensors differ), so the version would be a mixture: the weights of these trainer ranks have drifted apart"
            )


async def _place_rank(
    context: RoundContext, flow: WindowFlow, link: RankHandle[TrainerRank], first: int, window_bytes: int
) -> WindowPlaced:
    """Let one rank place its windows. Returns the end of its stream."""
    number, world_size, limit = first, len(context.trainers), context.deadline
    stamp: int | None = None
    while True:
        await flow.room(number, link.rank.hello.windows * world_size, limit)
        call = context.calls.get(link.member, 0)
        body = PlaceWindow(context.number, context.epoch, number, flow.released, window_bytes, call)
        [placed] = (await on_all("place", limit, {link.member: link}, body, WindowPlaced)).values()
        if stamp not in (None, placed.stamp):
            raise ProtocolError(f"{link.member} placed windows of two streams: the first one was interrupted there")
        stamp = placed.stamp
        if not placed.parts:
            flow.rank_ended(placed.windows)
            return placed
        flow.put(number, placed)
        failpoints.reached("round.window")
        number += world_size


# The replicas' side.


async def _update_replica(flow: WindowFlow, context: RoundContext, report: Report, placing: Placing) -> None:
    """Take one replica through the stream."""
    replica = report.replica
    engines = replica.members()
    try:
        replica.require_complete()
        if not replica.takes_any:
            await _agree(context, flow, report, engines)
            await flow.get(0, context.deadline)
        async with drained(context, report), out_of_service(context, report, engines) as serves:
            try:
                if replica.takes_any:
                    await _agree(context, flow, report, engines)
                await pause(context, report, engines, _step_deadline(context, flow))
                with report.phase("move"):
                    placement = await _move(context, flow, report, engines, placing)
                failpoints.reached("round.moved")
            except asyncio.CancelledError:
                failure = placing.exception() if placing.done() and not placing.cancelled() else None
                if failure is None:
                    raise
                raise WeightSyncError(str(failure)) from failure  # what ended this is sent to the replica's ranks
            finally:
                flow.leave(replica.name)  # before a quarantine, for which the others need not wait
            with report.phase("verify"):
                _verify(report.moved, placement)
            failpoints.reached("round.verified")
            await finish(report, engines, placement.version, context.deadline)
            serves(placement.version)
    finally:
        flow.leave(replica.name)


def _step_deadline(context: RoundContext, flow: WindowFlow) -> RoundDeadline:
    """How long a replica may take for one step: half of the time that is left, where others wait for it.

    The last one has a little less than all of it, so that its failure is known before the trainer's ranks have waited for too long.
    """
    left = context.deadline.remaining("the next step of the stream")
    return RoundDeadline(left / 2 if flow.readers > 1 else left - min(_LAST_SECONDS, left / 20))


async def _agree(context: RoundContext, flow: WindowFlow, report: Report, engines: Engines) -> None:
    with report.phase("agree"):
        limit = _step_deadline(context, flow)
        await wait_for_background(report.replica, limit)
        report.agreement = await open_stream(context.trainers, engines, limit)
    failpoints.reached("round.agreed")


async def _move(context: RoundContext, flow: WindowFlow, report: Report, engines: Engines, placing: Placing) -> Placement:
    """Bring every window to every rank, in order, and compare the digests of each at once."""
    number, world_size = 0, len(context.trainers)
    flow.took(report.replica.name, number)
    while (window := await flow.get(number, context.deadline)) is not None:
        await flow.turn(number, context.deadline)
        body = MoveWindow(number, number % world_size, window)
        for member, arrived in (await on_all("move", _step_deadline(context, flow), engines, body, WindowMoved)).items():
            _compare(member, window, arrived)
        number += 1
        flow.took(report.replica.name, number)
    placement, _ = await bounded("ending the stream", context.deadline, asyncio.shield(placing))
    moved = await on_all("move", context.deadline, engines, EndStream(placement.version.manifest), Moved)
    for member, answer in moved.items():
        if answer.nbytes != flow.tensors.nbytes:
            raise ProtocolError(f"{member} moved {answer.nbytes:,} bytes instead of the {flow.tensors.nbytes:,} of the stream")
    report.moved = moved
    return placement


def _compare(member: str, window: WindowPlaced, arrived: WindowMoved) -> None:
    wrong = np.flatnonzero(unpacked(arrived.digests) != unpacked(window.digests))
    if len(wrong):
        raise VerificationError(
            f"{len(wrong)} of {len(window.parts)} tensors of a window arrived at {member} with other bytes than were published: "
            f"{window.parts[int(wrong[0])].name}"
        )


def _verify(moved: Mapping[str, Moved], placement: Placement) -> None:
    for member, answer in moved.items():
        check_digests(member, answer.digests, len(placement.digests), "tensors")
        wrong = np.flatnonzero(unpacked(answer.digests) != placement.digests)
        if len(wrong):
            raise VerificationError(f"{len(wrong)} of {len(placement.digests)} tensors of {member} differ from the published ones")
