"""Updating a running engine from outside, over its own HTTP routes and a process group: one interface for all engines.

A client is one engine at one URL. What it says to the engine is built by pure functions, a file for each engine; this file sends
it: the request from a thread, the bytes at the same time through the group, and no wait without a deadline.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.closing import Closeable, OnFailure
from weightsync.config import Secret
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, DeadlineExceeded, LoadError, ProtocolError, WeightSyncError
from weightsync.external.clients.http import EngineHttp, HttpCall
from weightsync.forks import Origin
from weightsync.model import Manifest, PauseMode, TensorSpec
from weightsync.transports.hostinfo import reachable_address
from weightsync_disaggregated.clients.bodies import GroupSpec, destroy_group, init_group

if TYPE_CHECKING:
    import torch

    from weightsync.transports.broadcast.process_groups import Backend, ProcessGroup

# Process groups are imported when one is made: they bring torch and numba, and who only sends requests needs neither.

_CLEANUP_SECONDS = 10.0


class Bucket(NamedTuple):
    """What one request speaks of. ``memory`` holds the tensors of ``specs`` one after the other, without padding (``uint8``)."""

    specs: Sequence[TensorSpec]
    memory: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """The bytes of each tensor: views of ``memory``."""
        sizes = [spec.nbytes for spec in self.specs]
        ends = list(accumulate(sizes))
        return [self.memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class UpdateClient(Closeable):
    """One engine to be updated. Derive from it for a kind of engine; methods that it does not have raise ``ConfigurationError``.

    An update is ``check``, ``join``, ``pause``, ``begin``, ``update`` for every bucket (``last`` with the last), ``commit``,
    ``flush`` (true where the engine flushed already), ``resume``. After an error: ``abort``, and everything again; an engine that
    was not committed must not be resumed. Used by one thread. Raises :class:`~weightsync.errors.LoadError` for what the engine
    refused, :class:`~weightsync.errors.PeerLost` and :class:`~weightsync.errors.DeadlineExceeded`; errors of another weightsync are
    raised as what they are.
    """

    engine = "custom"
    verifies = False
    """Whether the engine compares digests before it serves."""
    missing_route = ""
    """What to do about a route that the engine does not have."""
    info: HttpCall | None = None
    """The request whose answer has the label of what is served, as ``weight_version``."""

    def __init__(
        self,
        url: str,
        *,
        token: Secret | None = None,
        group: str = "weightsync",
        backend: Backend = "nccl",
        ranks: int = 1,
        address: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._origin = Origin()
        self._http = EngineHttp(url, token, self.missing_route)
        self.url, self.group_name, self.backend, self.ranks = self._http.url, group, backend, ranks
        self._address, self._device = address, device
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="weightsync-push")
        self._group: ProcessGroup | None = None
        self.label = ""

    # What an engine's own file says.

    def _init(self, request: GroupSpec) -> HttpCall:
        return init_group(request)

    def _destroy(self) -> HttpCall:
        return destroy_group(self.group_name)

    @abstractmethod
    def _bucket(self, specs: Sequence[TensorSpec], last: bool) -> HttpCall: ...

    @abstractmethod
    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Stop generating; what running requests come to is for ``mode`` to say, as far as the engine knows it."""

    def resume(self, deadline: Deadline) -> None:
        """Generate again. By default nothing was held back, or the commit resumed."""

    def flush(self, deadline: Deadline) -> None:
        """Drop caches made with the old weights. Raises :class:`~weightsync.errors.LoadError` if the engine did not.

        By default the last bucket or the commit dropped them, or there is no way to.
        """

    def version(self, deadline: Deadline) -> str | None:
        """The label of the weights that the engine says it serves; ``None`` where it says nothing."""
        if self.info is None:
            return None
        answer = self.call(self.info, deadline)
        if not isinstance(answer, dict):
            raise ProtocolError(f"{self.url} answered {self.info.path} with a {type(answer).__name__}")
        label = answer.get("weight_version")
        return None if label is None else str(label)

    def begin(self, label: str | None, fingerprint: str | None, deadline: Deadline, whole: Deadline | None = None) -> None:
        """Start an update to ``label``.

        Args:
            label: The version's label, if it has one.
            fingerprint: That of the manifest of everything that will be sent, if it is known.
            deadline: Bounds this step.
            whole: Bounds the update, for an engine that ends it by itself; without it, ``deadline``.
        """
        self.label = label or ""

    @abstractmethod
    def commit(self, digests: Mapping[str, str], deadline: Deadline) -> str:
        """End an update of which everything was sent, and say in words what the engine made of it."""

    def abort(self, deadline: Deadline) -> None:
        """Give an update up, as far as the engine has a way to."""

    def check(self, manifest: Manifest, label: str | None, deadline: Deadline) -> None:
        """Before anything is paused: raise what the engine has against these tensors, as far as it has a way to tell."""

    # The same for all.

    def join(self, deadline: Deadline) -> None:
        """Make a group with the engine's ranks."""
        from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group

        address = self._address or reachable_address(self._http.host, self._http.port)
        world = self.ranks + 1
        rendezvous = StoreRendezvous(address, world, deadline)
        spec = GroupSpec(address, rendezvous.port, 1, world, self.group_name, self.backend)

        def here() -> ProcessGroup:
            return init_custom_process_group(
                self.backend, 0, world, self.group_name, deadline, rendezvous=rendezvous, device=self._device
            )

        with OnFailure(rendezvous.close):
            self._group = self._together(self._init(spec), here, deadline, rendezvous.close)

    def update(self, bucket: Bucket, last: bool, deadline: Deadline) -> None:
        """Send one bucket; returns when the engine has loaded it."""
        group = self._group
        if group is None or group.closed:
            raise ConfigurationError(f"no group with {self.url}: join first")

        def cancel() -> None:
            group.close()
            self._leave_remote(Deadline(_CLEANUP_SECONDS))

        self._together(self._bucket(bucket.specs, last), lambda: self._send(group, bucket, deadline), deadline, cancel)

    def _send(self, group: ProcessGroup, bucket: Bucket, deadline: Deadline) -> None:
        memory = bucket.memory[: sum(spec.nbytes for spec in bucket.specs)]
        group.broadcast([memory if self._device is None else memory.to(self._device)], deadline)

    def _together(
        self, call: HttpCall, collective: Callable[[], ProcessGroup | None], deadline: Deadline, cancel: Callable[[], None]
    ) -> ProcessGroup | None:
        """Run a request and the collective that pairs with it; the first that fails ends the other.

        If the request is refused, no engine takes part in the collective: ``cancel`` ends it, so that this side does not wait.
        """
        what = f"{call.path} at {self.url}"
        request = self._threads.submit(self.call, call, deadline)
        moving = self._threads.submit(collective)
        try:
            done, _ = wait((request, moving), timeout=deadline.remaining(what), return_when=FIRST_COMPLETED)
            if moving in done and moving.exception() is not None and request not in done:
                # The engine may know better why; but one that went away says nothing.
                wait((request,), timeout=min(2.0, deadline.remaining(what)))
            if request.done():
                request.result()
            result = moving.result(deadline.remaining(what))
            request.result(deadline.remaining(what))
            return result
        except BaseException as error:
            if not moving.done():
                cancel()
                wait((moving, request), timeout=_CLEANUP_SECONDS)
            if moving.done() and moving.exception() is None and (made := moving.result()) is not None:
                made.close()  # a group that came about here only, not at the engine
            if isinstance(error, TimeoutError) and not isinstance(error, WeightSyncError):
                raise DeadlineExceeded(f"{what} did not finish within {deadline.seconds:g} s") from error
            raise

    def _leave_remote(self, deadline: Deadline) -> None:
        with suppress(WeightSyncError):  # what matters is raised already, and a group that is gone is as good
            self.call(self._destroy(), deadline)

    def call(self, call: HttpCall, deadline: Deadline) -> Any:  # noqa: ANN401 - JSON
        """Send one request and return its decoded answer. See :meth:`EngineHttp.call`."""
        return self._http.call(call, deadline)

    def _check_label(self, deadline: Deadline) -> None:
        """Raise :class:`~weightsync.errors.LoadError` unless the engine took the update's label."""
        version = self.version(deadline)
        if version != self.label:
            raise LoadError(f"{self.url} says that it serves version {version!r}, not {self.label!r}")

    def leave(self, deadline: Deadline) -> None:
        """Destroy the group at both ends."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
            self._leave_remote(deadline)

    def close(self) -> None:
        """Destroy the group, and let go of connections and threads. In a forked child: nothing."""
        if self._origin.elsewhere:
            return
        self.leave(Deadline(_CLEANUP_SECONDS))
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._http.close()
