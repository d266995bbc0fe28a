"""What a training script uses: one object on every trainer rank."""

from __future__ import annotations

import logging
import math
import operator
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import ParamSpec

import torch
import torch.distributed as dist

from weightsync import failpoints
from weightsync.closing import Closeable
from weightsync.config import ClientSettings, Secret, Timeouts, agent_environment
from weightsync.deadline import Deadline
from weightsync.errors import (
    Aborted,
    ConfigurationError,
    CoordinatorUnreachable,
    DeadlineExceeded,
    ProtocolError,
    RoundFailed,
    VersionError,
    WeightSyncError,
    to_wire,
)
from weightsync.forks import Origin
from weightsync.launch import place_in_world
from weightsync.model import Version
from weightsync.protocol.connection import ConnectionLost, CoordinatorConnection
from weightsync.protocol.messages import (
    PROTOCOL,
    Body,
    CannotPublish,
    Hello,
    Publish,
    Published,
    ReplicaList,
    RoundResult,
    WaitForReplicas,
    Welcome,
)
from weightsync.protocol.round_log import MissedReplicas, log_result
from weightsync.protocol.worker import received_for
from weightsync.publishing.published_shards import network_of, publishing_transports
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import ShardedState
from weightsync.trainer.publisher import Placing, TrainerRole
from weightsync.trainer.stream import Stream, StreamedPublication, StreamRole
from weightsync.transports.base import Transport
from weightsync.transports.hostinfo import this_host

__all__ = ["Trainer"]

_MAX_ADDRESS = 8192
_TELLING_SECONDS = 5.0  # for the word that this rank cannot publish
_MESSAGE_CHARS = 4000
_CLOSED = "this trainer was closed and cannot publish any more: publish before close(), or make a new Trainer"
P = ParamSpec("P")
_log = logging.getLogger(__name__)


class Trainer(Closeable):
    """Publishes the weights of one trainer rank. Make one on every rank, and call :meth:`publish` on every rank.

    ``state`` is the module (FSDP2, tensor-parallel or plain), its state dict, or what an integration made of it
    (:func:`weightsync.integrations.megatron.hf_state`); or a :class:`Stream`, which holds no weights: see :meth:`publish_stream`.
    ``rank`` and ``world_size`` come from
    ``torch.distributed`` where it is initialised, else from torchrun or Slurm, else 0 of 1. ``coordinator`` is its URL (or
    ``WEIGHTSYNC_COORDINATOR``); without one, rank 0 starts a coordinator in this process and tells the others, and
    :attr:`coordinator` says where. ``dtype`` converts while publishing (float32 master weights to bfloat16, say); without it
    nothing is converted. Holds one copy of this rank's shards in host memory; but if they are all on one CUDA device, nothing is
    converted and ``transports`` allow ``cuda_ipc`` (by default all are allowed), they are read where they are, by engine ranks
    of GPUs of the same host and by no others. Where trainer and engine share a GPU, ``offload`` is called at the beginning of every
    publication, to make room for the engine (optimizer states, say; the weights must stay), and ``restore`` at its end, also if it
    failed. With ``seeds=False`` on every rank, a version can be read only until its publication ends, so a replica that joins later
    waits for the next one instead of getting the last one at once. With ``new_epoch=True`` on every rank, version numbers restart:
    for a trainer that goes on from an earlier checkpoint, and publishes numbers that an earlier trainer of the run used. Close it,
    or use it in a ``with``.

    Raises :class:`~weightsync.errors.CoordinatorUnreachable`, :class:`~weightsync.errors.AuthenticationError`,
    :class:`~weightsync.errors.MembershipError` (another trainer has this run),
    :class:`~weightsync.errors.ManifestMismatch` (this rank holds another model than the others) or
    :class:`~weightsync.errors.SharedMemoryTooSmall`.

    ::

        trainer = weightsync.Trainer(model, coordinator="http://head:7400")
        trainer.wait_for_replicas(1, timeout=600)
        for step, batch in enumerate(data):
            train_step(model, batch)
            if step % 4 == 0:
                trainer.publish(step)
    """

    _closed = False
    _version: Version | None = None

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
        new_epoch: bool = False,
        timeouts: Timeouts | None = None,
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
        self._offload, self._restore = offload, restore
        self.rank, self.world_size = place_in_world(rank, world_size)
        self._run, self._session = run, uuid.uuid4().hex
        self._new_epoch = new_epoch
        self._published = -1
        self._last = -1
        self._calls = 0
        self._asked: Future[RoundResult] | None = None  # the last stream's
        self._missed = MissedReplicas(_log)
        self._publishing = threading.Lock()
        self._host = this_host()
        with ExitStack() as owned:
            settings = self._settings = self._find_coordinator(coordinator, token, timeouts, owned)
            self.coordinator = settings.coordinator.url
            key, network = secrets.token_bytes(32), network_of(settings)
            allowed = publishing_transports(transports, network)
            self._role: TrainerRole | StreamRole
            if isinstance(state, Stream):
                self._role = StreamRole(state, allowed, key, self._host, self.rank, self.world_size, network=network, dtype=dtype)
            else:
                self._role = TrainerRole(
                    state, allowed, key, self._host, network=network, dtype=dtype, include_buffers=include_buffers, seeds=seeds
                )
            owned.callback(self._role.close)
            self._background = ThreadPoolExecutor(1, thread_name_prefix="weightsync-publish")
            owned.callback(self._background.shutdown, wait=False)  # what has not begun finds the link closed
            self._link = CoordinatorConnection(
                settings,
                hello=self._hello,
                receive=received_for(self._role.handle),
                on_welcome=self._welcomed,
                name=f"trainer/{self.rank}",
            )
            owned.callback(self._link.close)
            if settings.metrics_port is not None:
                from weightsync.server.agent_metrics import agent_metrics

                member = f"trainer/{self.rank}"
                owned.callback(agent_metrics.join(settings, member, self.rank, self._link, lambda: self._version))
            self._link.connect()
            self._owned = owned.pop_all()

    def _find_coordinator(self, url: str | None, token: str | None, timeouts: Timeouts | None, owned: ExitStack) -> ClientSettings:
        secret = Secret(token) if token else None
        if url is not None or os.environ.get("WEIGHTSYNC_COORDINATOR"):
            return ClientSettings.load(coordinator=url, token=secret, timeouts=timeouts)
        if self.world_size > 1 and not dist.is_initialized():
            raise ConfigurationError(
                "several trainer ranks without torch.distributed need a coordinator: give its URL or set WEIGHTSYNC_COORDINATOR"
            )
        mine = ""
        failure: WeightSyncError | None = None
        if self.rank == 0:
            try:
                server = owned.enter_context(BackgroundServer())
                mine = f"{server.url} {server.token}"
            except WeightSyncError as error:
                failure = error  # the other ranks wait to hear of it
        where, _, known = (_from_rank_zero(mine) if self.world_size > 1 else mine).partition(" ")
        if not where:
            raise failure or CoordinatorUnreachable("rank 0 could not start a coordinator in its process: its own error says why")
        return ClientSettings.load(coordinator=where, token=Secret(known), timeouts=timeouts)

    def _hello(self) -> Hello:
        role = self._role
        windows = (role.window_bytes, role.windows) if isinstance(role, StreamRole) else (0, 0)
        return Hello(
            protocol=PROTOCOL, run=self._run, role="trainer", name="trainer", rank=self.rank, world_size=self.world_size,
            session=self._session, host=self._host, pid=os.getpid(), manifest=role.manifest.tensors,
            layout=role.layout.to_columns(), offers=role.offers, key=role.key, published=self._published,
            live=role.live, epoch=role.epoch, new_epoch=self._new_epoch,
            version=self._version, window_bytes=windows[0], windows=windows[1],
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which an engine's process finds and is admitted by this trainer's coordinator. Holds the token."""
        return agent_environment(self._settings)

    def _welcomed(self, welcome: Welcome) -> None:
        self._last = max(self._last, welcome.last)

    @property
    def last_version(self) -> int | None:
        """The highest version number that is known in this trainer's epoch, from any trainer process; ``None`` before the first.

        ``publish()`` without a number takes the next.
        """
        return self._last if self._last >= 0 else None

    def wait_for_replicas(self, count: int = 1, timeout: float | None = None, *, names: Iterable[str] = ()) -> tuple[str, ...]:
        """Wait until ``count`` replicas, those of ``names`` among them, have joined whole and hold this trainer's tensors.

        Returns the names of all that do.

        Any rank may call it. Raises :class:`~weightsync.errors.DeadlineExceeded` saying who is there, and what the others lack.
        """
        self._check_open()
        deadline = Deadline(self._settings.timeouts.replicas if timeout is None else timeout)
        wanted = WaitForReplicas(count, tuple(names))
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

    @property
    def in_place(self) -> bool:
        """Whether engines read this rank's own GPU memory, of which no copy is kept. Then there is no :meth:`publish_async`."""
        return isinstance(self._role, TrainerRole) and self._role.in_place

    def publish(self, number: int | None = None, *, step: int | None = None, timeout: float | None = None) -> RoundResult:
        """Bring the weights as they are now to every replica, as version ``number``: larger than any before it, or the next.

        Every trainer rank calls this with the same number. Returns the round's result when the replicas serve the version. Once it
        returned, the trainer's memory is not read any more, even if the engines have not finished. ``step`` is the training
        framework's own count, for the result; it may repeat.

        Raises :class:`~weightsync.errors.VersionError` (published before, or other ranks publish another number),
        :class:`~weightsync.errors.ConfigurationError` (an invalid timeout or step),
        :class:`~weightsync.errors.Aborted` (after :meth:`close`, or another rank failed before it could publish),
        :class:`~weightsync.errors.PeerLost` (another rank is gone),
        :class:`~weightsync.errors.DeadlineExceeded` (a rank never came, or the round took too long) and
        :class:`~weightsync.errors.RoundFailed` when fewer replicas than the coordinator's policy requires took the version.
        Replicas that failed never serve in between: see the result's ``replicas``.
        """
        with (
            self._turn(number, step, timeout) as (plain, count, deadline),
            self._armed(plain, deadline, copies=False) as placing,
        ):
            return self._ask(plain, self._calls, deadline, placing, count)

    def publish_async(
        self, number: int | None = None, *, step: int | None = None, timeout: float | None = None
    ) -> Future[RoundResult]:
        """Publish as :meth:`publish` does, but return as soon as this rank's shards are copied, with a future of the result.

        After that the trainer's memory is not read any more, so the optimizer may step while engines read the copy. The future
        raises what :meth:`publish` does.

        Raises what :meth:`publish` raises before the copy, and :class:`~weightsync.errors.ConfigurationError` where the memory is
        published :attr:`in_place`, without a copy, or with ``seeds=False``.
        """
        with (
            self._turn(number, step, timeout) as (plain, count, deadline),
            self._armed(plain, deadline, copies=True) as placing,
        ):
            asked = self._submit(self._ask, plain, self._calls, deadline, placing, count)
            asked.add_done_callback(lambda _: placing.set())
            what = "the next version" if plain is None else f"version {plain}"
            if not placing.wait(deadline.remaining(f"placing {what}")):
                raise DeadlineExceeded(f"{what} was not placed within {deadline.seconds:g} s: its rank may not publish it later")
            if placing.number is None and asked.done():  # what fails after the copy is the future's to raise
                asked.result(0)
            return asked

    def publish_stream(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        number: int | None = None,
        *,
        step: int | None = None,
        timeout: float | None = None,
    ) -> RoundResult:
        """Bring the whole tensors that an iterator yields to every replica, as version ``number``, or the next.

        For a trainer made of a :class:`Stream`, on every rank, with the same tensors in the same order. Names, shapes and dtypes
        need not be known before. A tensor is used until the next one is asked for. Gathering overlaps with sending, and only the
        windows are held, never the model. The iterator runs in this thread and, because gathers are collective, always to its end:
        also if readers fail, the coordinator is gone or the time is over. Then the rest is dropped, and this raises afterwards.

        All replicas that have joined take the one pass together. One that is late, or failed, waits for the next publication.

        Args:
            tensors: Pairs of a name and a whole tensor.
            number: Version number.
            step: The training framework's own count, for display; it may repeat.
            timeout: Seconds for everything, the gathering included.

        Raises:
            ConfigurationError: The trainer publishes a module, ``timeout`` or ``step`` is invalid, or the iterator brought no
                bytes, or what is not a plain tensor.
            ManifestMismatch: The iterator brought a name twice.
            Aborted: The iterator of another rank raised. What this rank's iterator raises is raised as it is.
            RoundFailed: As of :meth:`publish`, or the coordinator was lost meanwhile.
            VersionError: As of :meth:`publish`, like :class:`~weightsync.errors.PeerLost` and
                :class:`~weightsync.errors.DeadlineExceeded`.
        """
        self._origin.require("this trainer")
        begun = False
        try:
            with self._turn(number, step, timeout) as (plain, count, deadline):
                role = self._role
                if not isinstance(role, StreamRole):
                    raise ConfigurationError(
                        "this trainer publishes a module with publish(): streams need weightsync.Trainer(weightsync.Stream())"
                    )
                self._end_earlier_stream(deadline)
                self._calls += 1
                publication = role.begin(plain)
                try:
                    asked = self._asked = self._submit(self._ask_once, plain, self._calls, deadline, count)
                    asked.add_done_callback(lambda asked: _stop(publication, asked))
                    begun = True
                    try:
                        publication.drain(tensors, deadline)
                    except Exception:
                        wait([asked], max(0.0, deadline.at - time.monotonic()))  # the other ranks hear of it in the round
                        raise
                    return asked.result()
                finally:
                    role.end()
        except Exception:
            if not begun:
                for _ in tensors:  # the other ranks gather
                    pass
            raise

    def _submit(self, ask: Callable[P, RoundResult], *args: P.args, **kwargs: P.kwargs) -> Future[RoundResult]:
        """Run ``ask`` in the background. Raises :class:`~weightsync.errors.Aborted` if :meth:`close` came in between."""
        try:
            return self._background.submit(ask, *args, **kwargs)
        except RuntimeError:
            raise Aborted(_CLOSED) from None

    def _end_earlier_stream(self, deadline: Deadline) -> None:
        """Wait for the round of a stream that was interrupted here: its windows must not be mixed with those of the next one."""
        if self._asked is not None:
            wait([self._asked], deadline.remaining("the publication before"))
            if not self._asked.done():
                raise DeadlineExceeded("the round of a stream that was interrupted is still running")

    def _ask_once(self, number: int | None, call: int, deadline: Deadline, step: int | None) -> RoundResult:
        """Publish a stream, which cannot be repeated where the connection was lost."""
        failpoints.reached("trainer.publish")
        try:
            answer = self._link.call(Publish(number, call, step), deadline.remaining("publishing a stream"))
        except ConnectionLost as error:
            raise RoundFailed(f"the coordinator was lost while a stream was published: {error}") from error
        return self._finished(answer)

    @contextmanager
    def _turn(
        self, number: int | None, step: int | None, timeout: float | None
    ) -> Iterator[tuple[int | None, int | None, Deadline]]:
        """Check the arguments of a publication, and keep other threads from publishing meanwhile."""
        number = None if number is None else _version_number(number)
        step = None if step is None else _step_count(step)
        timeout = self._settings.timeouts.publish if timeout is None else timeout
        if not (math.isfinite(timeout) and timeout > 0):
            raise ConfigurationError(
                f"publish(timeout={timeout!r}) leaves no time to publish: give the seconds that it may take, more than zero"
            )
        self._check_open()
        deadline = Deadline(timeout)
        if not self._publishing.acquire(timeout=timeout):
            raise DeadlineExceeded(f"another thread of this trainer rank was still publishing after {timeout:g} s")
        try:
            yield number, step, deadline
        finally:
            self._publishing.release()

    @contextmanager
    def _armed(self, number: int | None, deadline: Deadline, *, copies: bool) -> Iterator[Placing]:
        """Let the shards be placed as ``number``. Around it ``offload`` and ``restore`` run."""
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
                if isinstance(self._role, StreamRole):
                    raise ConfigurationError(
                        "this trainer publishes a Stream: call publish_stream() with an iterator of its tensors"
                    )
                placing = self._role.arm(number)
            except BaseException as error:
                self._tell_others(number, error, deadline)
                raise
            undo.callback(self._role.disarm)
            self._calls += 1
            yield placing

    def _tell_others(self, number: int | None, error: BaseException, deadline: Deadline) -> None:
        """This rank fails before it asked the coordinator: without a word, the other ranks would wait for it."""
        if self.world_size == 1:
            return
        kind, message = to_wire(error)
        try:
            left = min(_TELLING_SECONDS, deadline.remaining("telling the other ranks"))
            self._link.call(CannotPublish(number, kind, message[:_MESSAGE_CHARS]), left)
        except WeightSyncError as unsent:
            _log.warning("trainer rank %d cannot publish, and could not tell the others: %s", self.rank, unsent)

    def _ask(self, number: int | None, call: int, deadline: Deadline, placing: Placing, step: int | None = None) -> RoundResult:
        lost = False
        while True:
            wanted = number if number is not None else placing.number
            what = "the next version" if wanted is None else f"version {wanted}"
            timeout = deadline.remaining(f"publishing {what}")
            try:
                answer = self._link.call(Publish(wanted, call, step), timeout)
                break
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
        self._version, self._published = result.version, result.version.number
        self._last = max(self._last, self._published)
        if self.rank == 0:
            log_result("trainer/0", result)
        self._missed.warn(result)
        if not result.ok:
            raise RoundFailed(f"version {result.version} did not reach the replicas that are required: {result.error}")
        return result

    def _check_open(self) -> None:
        self._origin.require("this trainer")
        if self._closed:
            raise Aborted(_CLOSED)

    def close(self) -> None:
        """Leave the coordinator, stop serving shards, free the region. Replicas keep what they have. Safe twice.

        In a forked child (a data loader's worker) this does nothing: the trainer is its parent's.
        """
        if self._origin.elsewhere:
            return
        self._closed = True
        self._asked = None  # its callback refers to the windows, which must not be in use when they are freed
        self._owned.close()


def _stop(publication: StreamedPublication, asked: Future[RoundResult]) -> None:
    """The round of ``publication`` is over: if it failed, nothing more needs to be sent."""
    error = asked.exception()
    if error is not None:
        publication.stop(error)


def _version_number(number: int) -> int:
    try:
        plain = -1 if isinstance(number, bool) else operator.index(number)  # NumPy's and torch's integers, too
    except TypeError:
        plain = -1
    if not 0 <= plain < 1 << 63:
        raise VersionError(f"a version is an integer from 0 to 2^63 - 1, not {number!r}")
    return plain


def _step_count(step: int) -> int:
    try:
        plain = operator.index(step)  # NumPy's and torch's integers, too
    except TypeError:
        plain = 1 << 63
    if not -1 << 63 <= plain < 1 << 63:
        raise ConfigurationError(f"a step is an integer of 64 bits, not {step!r}")
    return plain


def _from_rank_zero(text: str) -> str:
    """What rank 0 holds, on every rank, as a tensor of bytes (an object broadcast would be a pickle)."""
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"
    buffer = torch.zeros(_MAX_ADDRESS, dtype=torch.uint8, device=device)
    data = text.encode()
    buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    dist.broadcast(buffer, src=0)
    return bytes(buffer.cpu().tolist()).rstrip(b"\0").decode()
