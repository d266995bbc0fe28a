"""What a training script uses: one object on every trainer rank."""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from msgspec import structs

from weightsync import failpoints
from weightsync.closing import Closeable
from weightsync.config import Secret, Timeouts, agent_environment
from weightsync.deadline import Deadline
from weightsync.errors import (
    Aborted,
    ConfigurationError,
    DeadlineExceeded,
    ProtocolError,
    RoundFailed,
    VersionError,
    WeightSyncError,
    to_wire,
)
from weightsync.forks import Origin
from weightsync.launch import place_in_world
from weightsync.model import PauseMode, Version
from weightsync.outcome import Latch, Outcome
from weightsync.protocol.connection import ConnectionLost, CoordinatorConnection
from weightsync.protocol.messages import (
    PROTOCOL,
    Body,
    CannotPublish,
    CountOn,
    Hello,
    Publish,
    Published,
    ReplicaList,
    RoundResult,
    WaitForReplicas,
    Welcome,
)
from weightsync.protocol.round_log import MissedReplicas, log_result
from weightsync.protocol.worker import IncomingCall, received_for
from weightsync.publishing.publication import ReaderAccess
from weightsync.publishing.published_shards import ShardOptions, network_of, publishing_transports
from weightsync.tensors.served_formats import Quantize
from weightsync.tensors.shards import ShardedState
from weightsync.trainer.background import Background, complete, wait_until_free
from weightsync.trainer.find_coordinator import find_coordinator
from weightsync.trainer.format_choice import AS_SERVED, format_choice
from weightsync.trainer.kept_stream import KeptStream
from weightsync.trainer.maxima_group import MaximaGroup
from weightsync.trainer.requests import PublishRequests
from weightsync.trainer.storing import Storing
from weightsync.trainer.stream import Stream, StreamRole
from weightsync.trainer.trainer_role import Placing, TrainerRole
from weightsync.transports.base import Transport
from weightsync.transports.hostinfo import this_host

_ANSWER_SECONDS = 10.0  # beyond a publication's deadline, whose own error arrives first
_CLOSING_SECONDS = 10.0  # for a thread that publishes
_UNUSED = Stream(window_bytes=4096)  # of a trainer whose stream is kept
_TELLING_SECONDS = 5.0  # for the word that this rank cannot publish
_MESSAGE_CHARS = 4000
_CLOSED = "this trainer was closed and cannot publish any more: publish before close(), or make a new Trainer"
_log = logging.getLogger(__name__)


class Trainer(Closeable):
    """Publishes the weights of one trainer rank. Make one on every rank, and call :meth:`publish` on every rank.

    The constructor lists this rank's shards and joins the coordinator, which plans once which engine rank reads which bytes from
    which trainer rank. In each :meth:`publish`:

    1. A round starts when all trainer ranks have asked for the same version.
    2. Each rank copies its shards into its *region*, host memory that transports serve, and digests them in the same pass. If all
       shards are on one CUDA device and ``transports`` allow ``cuda_ipc``, the region is in that GPU's memory, and only GPUs of
       the same host read it: a copy if ``dtype`` converts something, otherwise the shards themselves, which must not change until
       the round ends.
    3. Each replica pauses. Its ranks read their own boxes from the regions, each byte once, and digest what they installed.
    4. A replica serves the version only if the digests of all of its ranks add up to the published ones. One that failed stays
       paused until a later round succeeds. None waits for another.
    5. ``publish`` returns a :class:`~weightsync.RoundResult` with an entry for each replica.

    ``state`` is the module (FSDP2, tensor-parallel or plain), its state dict, what an integration made of it
    (:func:`weightsync.integrations.megatron.hf_state`), or a :class:`Stream` (see :meth:`publish_stream`). ``rank`` and
    ``world_size`` default to those of ``torch.distributed``, torchrun or Slurm, then to 0 of 1. ``coordinator`` is its URL (or
    ``WEIGHTSYNC_COORDINATOR``); without one, rank 0 starts one in this process, and :attr:`coordinator` says where
    (``start_coordinator=False``: this machine's is used). ``dtype`` converts while publishing. Where trainer and engine share a
    GPU, ``offload`` makes room for the engine when a publication begins (the weights must stay), and ``restore`` is called at its
    end, also after a failure. With ``seeds=False`` on every rank a version can be read only until its publication ends. With
    ``new_epoch=True`` on every rank a trainer that continues from an earlier checkpoint may use version numbers again.
    With ``deltas=True`` (or the most bytes of lists) replicas read only words that changed; it takes one more copy of the shards.
    ``quantize``, the same on every rank, publishes matrices in low precision, under the names of a quantized checkpoint: a mapping
    of patterns to formats (``{"*_proj.weight": "fp8-block"}``), a ``quantization_config``, the folder of a checkpoint with one, or
    ``"as-served"``, for what the first engine holds. Its coordinator runs already, and the constructor waits for the engine.
    ``pause_mode``, the same on every rank, is what an update does to running requests: ``"abort"`` ends them with partial output,
    ``"wait"`` lets them finish, ``"keep"`` continues them; it defaults to the coordinator's (``abort``). Close it, or use ``with``.

    Raises :class:`~weightsync.errors.CoordinatorUnreachable`, :class:`~weightsync.errors.AuthenticationError`,
    :class:`~weightsync.errors.MembershipError` (another trainer has this run), :class:`~weightsync.errors.ManifestMismatch` (this
    rank holds another model than the others) or :class:`~weightsync.errors.SharedMemoryTooSmall`.

    ::

        weightsync.Trainer(model, coordinator="http://head:7400").publish(step)  # after each optimizer step, or every few
    """

    _closed = False
    _version: Version | None = None
    _unchanged = False
    _stores = True
    _kept: KeptStream | None = None
    _allowed = staticmethod(publishing_transports)

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState | Stream,
        coordinator: str | None = None,
        *,
        token: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        run: str = "",
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        include_buffers: bool = False,
        transports: Sequence[Transport | str] | None = None,
        offload: Callable[[], object] | None = None,
        restore: Callable[[], object] | None = None,
        seeds: bool = True,
        deltas: bool | int = False,
        quantize: Quantize | None = None,
        new_epoch: bool = False,
        pause_mode: PauseMode | None = None,
        timeouts: Timeouts | None = None,
        start_coordinator: bool = True,
    ) -> None:
        if not isinstance(state, Mapping | torch.nn.Module | ShardedState | Stream):
            raise ConfigurationError(
                f"a trainer publishes a torch.nn.Module, a mapping of names to tensors or a Stream, not a {type(state).__name__}"
            )
        if isinstance(state, Stream) and (include_buffers or offload or restore):
            raise ConfigurationError(
                "a Stream has no buffers to include and nothing to offload: its iterator decides what it brings"
            )
        self._origin = Origin()
        self._offload, self._restore, self._seeds = offload, restore, seeds
        self.rank, self.world_size = place_in_world(rank, world_size)
        if isinstance(state, Stream) and deltas and self.world_size > 1:
            raise ConfigurationError(
                f"deltas of a Stream need one trainer rank, not {self.world_size}: make it with rank=0 and world_size=1 in one "
                "process that gets the whole stream. The others iterate without a Trainer"
            )
        self._run, self._session = run, Secret(uuid.uuid4().hex)
        self._new_epoch = new_epoch
        self._requests = PublishRequests(pause_mode)
        self._last = -1
        self._calls = secrets.randbits(48)
        self._asked: Latch | None = None  # set when the round of the last stream is over
        self._missed = MissedReplicas(_log)
        self._publishing = threading.RLock()
        """Reentrant, as that one knows whose it is: only what this thread took is given back."""
        self._host = this_host()
        with ExitStack() as owned:
            may_start = start_coordinator and quantize != AS_SERVED  # engines join before this trainer
            place = self.rank, self.world_size
            settings = self._settings = find_coordinator(place, coordinator, token, timeouts, owned, may_start)
            self.coordinator = settings.coordinator.url
            network = network_of(settings)
            self._access = ReaderAccess(self._allowed(transports, network), secrets.token_bytes(32), self._host, network)
            alone = quantize is None or self.world_size == 1 or isinstance(state, Stream)  # each rank of a stream has all tensors
            ranks = None if alone else MaximaGroup(self.rank, self.world_size)
            formats = None if quantize is None else format_choice(quantize, settings)
            self._options = ShardOptions(dtype, include_buffers, deltas, formats)
            self._role: TrainerRole | StreamRole
            if isinstance(state, Stream):
                self._role = StreamRole(_UNUSED if deltas else state, self._access, self.rank, self.world_size, dtype, formats)
                if deltas:
                    self._kept, self._options = KeptStream(self._role), ShardOptions(deltas=deltas)
            else:
                self._role = TrainerRole(state, self._access, self._options, seeds=seeds, ranks=ranks)
            owned.callback(lambda: self._role.close())  # noqa: PLW0108 - whichever it is then
            owned.callback(wait_until_free, self._publishing, _CLOSING_SECONDS)  # it finds the link closed
            self._background = Background("weightsync-publish")
            owned.callback(self._background.close)  # what has not begun finds the link closed
            self._link = CoordinatorConnection(
                settings, hello=self._hello, receive=self._received, on_welcome=self._welcomed, name=f"trainer/{self.rank}"
            )
            owned.callback(self._link.close)
            self._requests.link = self._link
            if settings.metrics_port is not None:
                from weightsync.server.agent_metrics import agent_metrics

                member = f"trainer/{self.rank}"
                owned.callback(agent_metrics.join(settings, member, self.rank, self._link, lambda: self._version))
            self._link.connect()
            self._storing = self._store(self._role, None if self._kept is not None else settings.store)
            owned.callback(lambda: self._storing.close())  # noqa: PLW0108
            self._owned = owned.pop_all()

    def _store(self, role: TrainerRole | StreamRole, where: str | None) -> Storing:
        stored = structs.replace(self._settings, store=where if self._stores else None)
        return Storing(stored, role, self.rank, self._link.call)

    def _received(self, body: Body) -> IncomingCall:
        return received_for(self._role.handle)(body)

    def _hello(self) -> Hello:
        role = self._role
        windows = (role.window_bytes, role.windows) if isinstance(role, StreamRole) else (0, 0)
        return Hello(
            protocol=PROTOCOL, run=self._run, role="trainer", name="trainer", rank=self.rank, world_size=self.world_size,
            session=self._session.reveal(), host=self._host, pid=os.getpid(), manifest=role.manifest.tensors,
            layout=role.layout.to_columns(), offers=role.offers, key=role.key,
            published=-1 if self._version is None else self._version.number,
            live=role.live, epoch=role.epoch, new_epoch=self._new_epoch, count=self._requests.count, start=self._requests.start,
            version=self._version, window_bytes=windows[0], windows=windows[1], order=role.order,
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which an engine's process finds and is admitted by this trainer's coordinator. Holds the token."""
        return agent_environment(self._settings)

    def _welcomed(self, welcome: Welcome) -> None:
        self._last = max(self._last, welcome.last)
        self._requests.start_after(welcome.count)

    @property
    def changed(self) -> dict[str, float]:
        """The part of the words of each tensor that the last version changed, in this rank's shards. Empty without ``deltas``."""
        changes = self._role.changes if isinstance(self._role, TrainerRole) else None
        return {} if changes is None else changes.shares

    @property
    def version(self) -> Version | None:
        """The version that this trainer published last; ``None`` before the first."""
        return self._version

    @property
    def last_version(self) -> int | None:
        """The highest number that is known in this trainer's epoch, from any trainer process. ``publish()`` takes the next."""
        return self._last if self._last >= 0 else None

    def wait_for_replicas(
        self,
        count: int = 1,
        timeout: float | None = None,
        *,
        names: Iterable[str] = (),
        refused: Literal["wait", "raise"] = "wait",
    ) -> tuple[str, ...]:
        """Wait until ``count`` replicas, those of ``names`` among them, have joined whole and hold this trainer's tensors.

        Returns the names of all that do. Any rank may call it. Raises :class:`~weightsync.errors.DeadlineExceeded` saying who is
        there, and what the others lack. With ``refused="raise"`` a replica with other tensors raises
        :class:`~weightsync.errors.ManifestMismatch` at once; by default another replica may still come.
        """
        self._check_open()
        deadline = Deadline(self._settings.timeouts.replicas if timeout is None else timeout)
        wanted = WaitForReplicas(count, tuple(names), refused)
        while True:
            try:
                answer = self._link.call(
                    wanted, deadline.remaining(f"waiting for {', '.join(wanted.names) or f'{count} replicas'}")
                )
            except ConnectionLost:
                continue  # the next call waits for the connection to come back
            if not isinstance(answer, ReplicaList):
                raise ProtocolError(f"the coordinator answered a wait for replicas with {type(answer).__name__}")
            return answer.names

    def wait_until_stored(self, timeout: float | None = None) -> Version | None:
        """Wait until this rank's last version is in the store, or was given up. Returns the last one that is there.

        ``None`` without a store (``WEIGHTSYNC_STORE``). Raises :class:`~weightsync.errors.DeadlineExceeded` after ``timeout``
        seconds, by default those that a version may take.
        """
        return self._storing.wait(timeout)

    @property
    def in_place(self) -> bool:
        """Whether engines read this rank's own GPU memory, of which no copy is kept. Then there is no :meth:`publish_async`."""
        return isinstance(self._role, TrainerRole) and self._role.in_place

    def publish(
        self,
        number: int | None = None,
        *,
        step: int | None = None,
        timeout: float | None = None,
        pause_mode: PauseMode | None = None,
    ) -> RoundResult:
        """Bring the weights as they are now to every replica, as version ``number``: larger than any before it, or the next.

        Every trainer rank calls this with the same number. Returns the round's result when the replicas serve the version. Once it
        returned, the trainer's memory is not read any more, even if the engines have not finished. ``step`` is the training
        framework's own count, for the result; it may repeat. ``pause_mode`` overrides the trainer's for this publication.

        Raises :class:`~weightsync.errors.VersionError` (published before, or other ranks publish another number),
        :class:`~weightsync.errors.ConfigurationError` (an invalid timeout, step or pause mode, or ranks whose pause modes differ),
        :class:`~weightsync.errors.Aborted` (after :meth:`close`, or another rank failed or was interrupted before all had called),
        :class:`~weightsync.errors.PeerLost` (another rank is gone), :class:`~weightsync.errors.ManifestMismatch` (it was refused,
        because it holds other tensors), :class:`~weightsync.errors.DeadlineExceeded` (a rank never came, or the round took too
        long) and :class:`~weightsync.errors.RoundFailed` (fewer replicas than the coordinator's policy requires took the version).
        Replicas that failed never serve in between: see the result's ``replicas``.
        """
        with (
            self._turn(number, step, timeout, pause_mode) as (wanted, deadline),
            self._armed(wanted, deadline, copies=False) as placing,
        ):
            return self._ask(wanted, deadline, placing)

    def publish_async(
        self,
        number: int | None = None,
        *,
        step: int | None = None,
        timeout: float | None = None,
        pause_mode: PauseMode | None = None,
    ) -> Future[RoundResult]:
        """Publish as :meth:`publish` does, but return as soon as this rank's shards are copied, with a future of the result.

        After that the trainer's memory is not read any more, so the optimizer may step while engines read the copy. The future
        raises what :meth:`publish` does.

        Raises what :meth:`publish` raises before the copy, and :class:`~weightsync.errors.ConfigurationError` where the memory is
        published :attr:`in_place`, without a copy, or with ``seeds=False``.
        """
        with (
            self._turn(number, step, timeout, pause_mode) as (wanted, deadline),
            self._armed(wanted, deadline, copies=True) as placing,
        ):
            future: Future[RoundResult] = Future()
            asked = Outcome[RoundResult](lambda asked: complete(future, asked, placing))
            self._background.submit(asked.run, self._ask, wanted, deadline, placing)
            what = "the next version" if wanted.number is None else f"version {wanted.number}"
            if not placing.wait(deadline.remaining(f"placing {what}")):
                raise DeadlineExceeded(f"{what} was not placed within {deadline.seconds:g} s: its rank may not publish it later")
            if placing.number is None and asked.error is not None:  # what fails after the copy is the future's to raise
                raise asked.error
            return future

    def publish_stream(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        number: int | None = None,
        *,
        step: int | None = None,
        timeout: float | None = None,
        pause_mode: PauseMode | None = None,
    ) -> RoundResult:
        """Bring the whole tensors that an iterator yields to every replica, as version ``number``, or the next.

        For a trainer made of a :class:`Stream`, on every rank, with the same tensors in the same order. Names, shapes and dtypes
        need not be known before. A tensor is used until the next one is asked for. Gathering overlaps with sending, and only the
        windows are held, never the model. The iterator runs in this thread and, because gathers are collective, always to its end:
        also if readers fail, the coordinator is gone or the time is over. Then the rest is dropped, and this raises afterwards.

        All replicas that have joined take the one pass together. One that is late, or failed, waits for the next publication.
        With ``deltas`` the one rank keeps all tensors instead, and publishes them as :meth:`publish` does.

        Args:
            tensors: Pairs of a name and a whole tensor.
            number: Version number.
            step: The training framework's own count, for display; it may repeat.
            timeout: Seconds for everything, the gathering included.
            pause_mode: Overrides the trainer's for this publication.

        Raises:
            ConfigurationError: The trainer publishes a module, ``timeout``, ``step`` or ``pause_mode`` is invalid, ranks' pause
                modes differ, or the iterator brought no bytes, or what is not a plain tensor.
            ManifestMismatch: The iterator brought a name twice.
            SharedMemoryTooSmall: With ``deltas``, there is no memory to keep a tensor.
            Aborted: The iterator of another rank raised, or another rank was interrupted before all had called. What this rank's
                iterator raises is raised as it is.
            RoundFailed: As of :meth:`publish`, or the coordinator was lost.
            VersionError: As of :meth:`publish`, like :class:`~weightsync.errors.PeerLost` and
                :class:`~weightsync.errors.DeadlineExceeded`.
        """
        self._origin.require("this trainer")
        begun = False
        try:
            with self._turn(number, step, timeout, pause_mode) as (wanted, deadline):
                role = self._role
                if self._kept is not None:
                    begun = True
                    return self._publish_kept(self._kept, tensors, wanted, deadline)
                if not isinstance(role, StreamRole):
                    raise ConfigurationError(
                        "this trainer publishes a module with publish(): streams need weightsync.Trainer(weightsync.Stream())"
                    )
                self._end_earlier_stream(deadline)
                self._calls += 1
                wanted = structs.replace(wanted, call=self._calls, above=role.highest)
                publication = role.begin(self._calls, wanted.number)
                asked = Outcome[RoundResult](publication.over)
                try:
                    self._background.submit(asked.run, self._ask_once, wanted, deadline)
                    self._asked = asked.over
                    begun = True
                    try:
                        publication.drain(tensors, deadline)
                    except Exception:
                        asked.over.wait(deadline.left)  # the other ranks hear of it in the round
                        raise
                    if not asked.over.wait(deadline.left + _ANSWER_SECONDS):
                        raise DeadlineExceeded(f"the stream's round did not end within {deadline.seconds:g} s")
                    return asked.result()
                finally:
                    role.end()
                    del asked, publication  # its error's traceback refers to this frame
        except Exception:
            if not begun:
                for _ in tensors:  # the other ranks gather
                    pass
            raise

    def _publish_kept(
        self, kept: KeptStream, tensors: Iterable[tuple[str, torch.Tensor]], wanted: Publish, deadline: Deadline
    ) -> RoundResult:
        """Publish what an iterator brings as shards. If they are others than before, this rank says Hello again first."""
        if kept.take(tensors) != self._role.manifest:
            self._storing.close(deadline.remaining("keeping a stream"))
            self._check_open()
            with ExitStack() as undo:
                role, before = TrainerRole(kept, self._access, self._options, seeds=self._seeds), self._role
                undo.callback(role.close)
                storing = self._store(role, self._settings.store)
                undo.callback(storing.close, 0.0)
                role.epoch, role.order, role.highest = before.epoch, before.order, before.highest
                self._session = Secret(uuid.uuid4().hex)  # nothing that was placed before counts
                self._role, self._storing = role, storing
                self._check_open()  # another thread closed what was there
                undo.pop_all()
            before.close()
            self._link.connect_again()
        with self._armed(wanted, deadline, copies=False, kept=True) as placing:
            return self._ask(wanted, deadline, placing)

    def _end_earlier_stream(self, deadline: Deadline) -> None:
        """Wait for the round of a stream that was interrupted here: its windows must not be mixed with those of the next one."""
        if self._asked is not None and not self._asked.wait(deadline.remaining("the publication before")):
            raise DeadlineExceeded("the round of a stream that was interrupted is still running")

    def _ask_once(self, wanted: Publish, deadline: Deadline) -> RoundResult:
        """Publish a stream, which cannot be repeated where the connection was lost."""
        failpoints.reached("trainer.publish")
        try:
            while isinstance(answer := self._link.call(wanted, deadline.remaining("publishing a stream")), CountOn):
                wanted = self._requests.count_on(wanted, answer.count)
        except ConnectionLost as error:
            raise RoundFailed(f"the coordinator was lost while a stream was published: {error}") from error
        return self._finished(answer)

    @contextmanager
    def _turn(
        self, number: int | None, step: int | None, timeout: float | None, mode: PauseMode | None
    ) -> Iterator[tuple[Publish, Deadline]]:
        """Count a publication, check its arguments, and keep other threads from publishing at the same time."""
        wanted = self._requests.make(number, step, mode)  # before what may fail
        timeout = self._settings.timeouts.publish if timeout is None else timeout
        if not (math.isfinite(timeout) and timeout > 0):
            raise ConfigurationError(
                f"publish(timeout={timeout!r}) leaves no time to publish: give the seconds that it may take, more than zero"
            )
        self._check_open()
        deadline = Deadline(timeout)
        try:  # around it all: a signal handler may raise right after the lock was taken
            if not self._publishing.acquire(timeout=timeout):
                raise DeadlineExceeded(f"another thread of this trainer rank was still publishing after {timeout:g} s")
            yield wanted, deadline
        finally:
            try:  # noqa: SIM105 (suppress() would be interrupted)
                self._publishing.release()
            except RuntimeError:
                pass  # another thread's

    @contextmanager
    def _armed(self, wanted: Publish, deadline: Deadline, *, copies: bool, kept: bool = False) -> Iterator[Placing]:
        """Let the shards be placed as ``wanted``. Around it ``offload`` and ``restore`` run."""
        with ExitStack() as undo:
            try:
                if self._restore is not None:
                    undo.callback(self._restore)
                if self._offload is not None:
                    self._offload()
                if copies and self.in_place:
                    raise ConfigurationError(
                        "publish_async() needs a copy of the weights, and this trainer publishes its GPU memory in place: call "
                        'publish(), or make the trainer with transports=["shared_memory", "tcp"], which copies first'
                    )
                if copies and isinstance(self._role, TrainerRole) and self._role.live:
                    raise ConfigurationError(
                        "publish_async() leaves its version readable, and this trainer was made with seeds=False: call publish()"
                    )
                failpoints.reached("trainer.publish")
                role = self._role
                if isinstance(role, StreamRole) or (self._kept is not None and not kept):
                    raise ConfigurationError(
                        "this trainer publishes a Stream: call publish_stream() with an iterator of its tensors"
                    )
                self._calls += 1
                undo.callback(role.disarm)  # first: a signal handler may raise right after arm()
                placing = role.arm(self._calls, wanted.number)
            except BaseException as error:
                self._tell_others(wanted, error, deadline)
                raise
            yield placing

    def _tell_others(self, wanted: Publish, error: BaseException, deadline: Deadline) -> None:
        """Report that this rank failed before its call; otherwise the other ranks would wait for it."""
        if self.world_size == 1:
            return
        kind, message = to_wire(error)
        try:
            left = min(_TELLING_SECONDS, deadline.remaining("telling the other ranks"))
            adapter = "" if wanted.adapter is None else wanted.adapter.name
            self._link.call(CannotPublish(wanted.number, kind, message[:_MESSAGE_CHARS], wanted.step, wanted.count, adapter), left)
        except WeightSyncError as unsent:
            _log.warning("trainer rank %d cannot publish, and could not tell the others: %s", self.rank, unsent)

    def _ask(self, wanted: Publish, deadline: Deadline, placing: Placing) -> RoundResult:
        lost = False
        while True:
            placed = placing.number  # one look: the coordinator that is lost may still have it placed
            number = wanted.number if placed is None else placed
            what = "the next version" if number is None else f"version {number}"
            body = structs.replace(wanted, call=placing.call, placed=-1 if placed is None else placed, above=placing.above)
            try:
                answer = self._link.call(body, deadline.remaining(f"publishing {what}"))
                if not isinstance(answer, CountOn):
                    break
                wanted = self._requests.count_on(wanted, answer.count)
            except ConnectionLost:
                lost = True  # it comes back, and the coordinator that is there then answers, or runs the round again
            except VersionError as error:
                if not lost:
                    raise
                raise RoundFailed(
                    f"the coordinator was lost during the round of {what}, and with it the result: some replicas may "
                    f"serve it, the others wait for the next number ({error})"
                ) from error
        return self._finished(answer)

    def _finished(self, answer: Body) -> RoundResult:
        """The result of a publication. Raises :class:`~weightsync.errors.RoundFailed` unless the required replicas took it."""
        if not isinstance(answer, Published):
            raise ProtocolError(f"the coordinator answered a publication with {type(answer).__name__}")
        failpoints.reached("trainer.published")
        result = answer.result
        if self.rank == 0:
            self._warn_if_unchanged(result.version)
        self._version = result.version
        self._last = max(self._last, result.version.number)
        if self.rank == 0:
            log_result("trainer/0", result)
        result = self._missed.warn(result)
        self._storing.published(result)
        if not result.ok:
            raise RoundFailed(f"version {result.version} did not reach the replicas that are required: {result.error}")
        return result

    def _warn_if_unchanged(self, version: Version) -> None:
        """Warn, once in a row, that a publication brought the very weights of the one before: the optimizer did not change them."""
        last = self._version
        unchanged = last is not None and last.digest == version.digest and last != version
        if unchanged and not self._unchanged:
            _log.warning("version %s has the same digest as %s: does the optimizer update the published tensors?", version, last)
        self._unchanged = unchanged

    def _check_open(self) -> None:
        self._origin.require("this trainer")
        if self._closed:
            raise Aborted(_CLOSED)

    def close(self) -> None:
        """Leave the coordinator, stop serving shards, free the region. Replicas keep what they have. Safe twice.

        A publication of another thread ends with :class:`~weightsync.errors.Aborted`, and is waited for, for at most 10 seconds.
        In a forked child (a data loader's worker) this does nothing: the trainer is its parent's.
        """
        if self._origin.elsewhere:
            return
        self._closed = True
        self._owned.close()
