"""Process groups of their own: a trainer and engine ranks that share no default world, only an address, a port and a name.

The rendezvous is that of the engines' disaggregated update: a TCP store at ``address:port`` whose master is rank 0 (the trainer),
under a prefix named after the group. It pairs with ``init_custom_process_group`` as LMDeploy and SGLang have it: the keys in the
store are theirs. The backend object is built directly, with no entry in ``torch.distributed``'s tables of groups: so it needs no
default group, disturbs none, several may live side by side, and the private functions that changed their arguments between torch
2.6 and 2.13 are not called.

NCCL aborts a collective that runs. Gloo cannot: one that runs ends when a peer closes its end, or at its own deadline.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from weightsync import forks
from weightsync.closing import OnFailure
from weightsync.daemon_threads import in_daemon_thread
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, PeerLost, TransportUnavailable, WeightSyncError
from weightsync.tensors.cuda.waiting import wait_for_device

Backend = Literal["gloo", "nccl"]
Enqueue = Callable[[torch.Tensor], None]
"""Puts the broadcast of a tensor's bytes into the current stream of its device."""

_c10d: Any = dist  # its stub leaves out the stores
_FIRST_DEVICE = {"gloo": "cpu", "nccl": "cuda"}
"""The device under whose prefix torch keeps a backend's keys, where one backend serves all devices of a group."""
_ROOT = 0
_FOREVER = timedelta(days=1)
_ABORT_SECONDS = 1.0
_MOST_JOINING = 32
_log = logging.getLogger(__name__)


class StoreRendezvous:
    """Rank 0's end of a rendezvous: a store that listens at once, before its address is sent. ``port`` 0 takes a free one."""

    def __init__(self, address: str, world_size: int, deadline: Deadline, port: int = 0) -> None:
        self.address = address
        try:
            self._store: Any = _c10d.TCPStore(
                address,
                port,
                world_size,
                is_master=True,
                timeout=_timeout(deadline, "opening a rendezvous"),
                wait_for_workers=False,
                multi_tenant=port != 0,
            )
            self.port = int(self._store.port)
            self.client: Any = _c10d.TCPStore(address, self.port, world_size, timeout=_timeout(deadline, "opening a rendezvous"))
            """How rank 0 itself meets the others: as a client, so that closing the store ends its waits too. ``None`` after it."""
        except RuntimeError as error:
            raise TransportUnavailable(f"cannot listen for a process group at {address}:{port}: {_first_line(error)}") from error
        forks.in_children(self, StoreRendezvous._inherited)

    def _inherited(self) -> None:
        """In a forked child: the stores' threads are the parent's, and their destructors would wait for them."""
        forks.keep_for_ever(self._store)
        forks.keep_for_ever(self.client)

    def close(self) -> None:
        """Stop listening. Ranks that still wait for the others, rank 0 included, get an error at once. Safe twice."""
        self._store = self.client = None


class ProcessGroup:
    """A joined group. Rank 0 sends, the others receive; one caller at a time. After an error it is closed and of no more use."""

    def __init__(self, name: str, backend: Backend, rank: int, world_size: int, process_group: Any, store: object) -> None:  # noqa: ANN401
        self.name, self.backend, self.rank, self.world_size = name, backend, rank, world_size
        self._process_group, self._store = process_group, store  # NCCL meets there only when it is first used
        self._lock = threading.Lock()
        self._closed = False
        self._over = threading.Event()
        forks.in_children(self, ProcessGroup._inherited)

    def _inherited(self) -> None:
        """In a forked child: the group's threads are the parent's, and its destructor would wait for them."""
        self._closed = True
        forks.keep_for_ever(self._process_group)
        forks.keep_for_ever(self._store)
        self._process_group = None

    def broadcast(self, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
        """Send (rank 0) or receive (others) the bytes of contiguous ``tensors``, one collective each, in order; returns when done.

        Raises :class:`~weightsync.errors.DeadlineExceeded` or :class:`~weightsync.errors.PeerLost`, and closes the group.
        """
        if tensors and self.backend == "nccl":
            self.on_device(tensors[0].device, _one_by_one(tensors), deadline)
        else:
            self._run(lambda process_group, what: _through_gloo(process_group, tensors, deadline, what), deadline)

    def on_device(self, device: torch.device, work: Callable[[Enqueue], None], deadline: Deadline) -> None:
        """NCCL: let ``work`` queue kernels and broadcasts on ``device``; returns when all that it waited for is done.

        ``work`` gets a function that puts the broadcast of a tensor into the device's current stream, and runs in a thread, on a
        stream of its own, after all that the caller's current stream holds; it must wait for other streams that it uses. Raises
        as :meth:`broadcast` does.
        """
        over = self._over = threading.Event()
        self._run(lambda process_group, what: _through_nccl(process_group, device, work, deadline, what, over), deadline)

    def _run(self, broadcasts: Callable[[Any, str], None], deadline: Deadline) -> None:
        what = f"a broadcast in group {self.name!r}"
        if not self._lock.acquire(timeout=deadline.remaining(what)):
            raise DeadlineExceeded(f"group {self.name!r} was busy for {deadline.seconds:g} s")
        try:
            process_group = self._process_group
            if process_group is None or self._closed:
                raise PeerLost(f"group {self.name!r} was destroyed")
            try:
                broadcasts(process_group, what)
                if self._closed:  # gloo cannot abort: what arrives after a close is dropped
                    raise PeerLost(f"group {self.name!r} was destroyed in the middle of a broadcast")
            except WeightSyncError as error:
                self._closed = True
                error.__traceback__ = None  # whose frames hold the group, and so connections, for as long as the error lives
                raise
            except RuntimeError as error:
                self._closed = True
                raise self._failure(error, deadline) from error.with_traceback(None)
            finally:
                del process_group
        finally:
            self._lock.release()
            if self._closed:
                self._release()

    def _failure(self, error: Exception, deadline: Deadline) -> WeightSyncError:
        text = _first_line(error)
        if self._closed and "abort" in text.lower():
            return PeerLost(f"group {self.name!r} was destroyed in the middle of a broadcast")
        if "timed out" in text.lower() or "timeout" in text.lower():
            return DeadlineExceeded(f"a broadcast in group {self.name!r} did not finish within {deadline.seconds:g} s")
        return PeerLost(f"a broadcast in group {self.name!r} (rank {self.rank} of {self.world_size}) failed: {text}")

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or broke."""
        return self._closed

    def close(self) -> None:
        """Leave: abort what runs where the backend can, and drop the connections, so that the others notice. Safe twice."""
        self._closed = True
        process_group = self._process_group
        if process_group is not None and self.backend == "nccl":
            process_group.abort()
        self._over.set()
        del process_group
        if self._lock.acquire(blocking=False):  # else its holder does so when the collective ends
            try:
                self._release()
            finally:
                self._lock.release()

    def _release(self) -> None:
        self._process_group = None
        self._store = None


def init_custom_process_group(
    backend: Backend,
    rank: int,
    world_size: int,
    name: str,
    deadline: Deadline,
    *,
    address: str = "",
    port: int = 0,
    rendezvous: StoreRendezvous | None = None,
    device: torch.device | None = None,
    interface: str = "",
    priority: bool = False,
    joining: Future[None] | None = None,
) -> ProcessGroup:
    """Join group ``name`` as ``rank`` of ``world_size``; returns when all ranks have (gloo) or can (NCCL connects when first used).

    Rank 0 gives its ``rendezvous``, the others its ``address`` and ``port``. ``device`` is the GPU that an NCCL rank uses,
    with ``priority`` ahead of other work of this process there. ``interface`` is the address of this host where gloo is to listen;
    without, torch's choice. A rank that gives ``joining`` stops waiting when another thread completes it, and fails at once if
    nothing listens at the address; without, it waits for a rendezvous that has not begun.
    Raises :class:`~weightsync.errors.TransportUnavailable` for a backend that is not there,
    :class:`~weightsync.errors.ConfigurationError` for an impossible rank, :class:`~weightsync.errors.DeadlineExceeded`,
    :class:`~weightsync.errors.PeerLost`.
    """
    if not 0 <= rank < world_size or (rank == _ROOT) != (rendezvous is not None):
        raise ConfigurationError(f"rank {rank} of {world_size} in group {name!r}; rank 0, and only it, brings the rendezvous")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise TransportUnavailable("backend 'nccl' needs a CUDA device and a torch with NCCL; use backend 'gloo' here")
    if backend == "gloo" and not dist.is_gloo_available():
        raise TransportUnavailable("this torch was built without gloo")
    what = f"joining group {name!r} as rank {rank} of {world_size}"

    def meet() -> ProcessGroup:
        if rendezvous is not None:
            store, at = rendezvous.client, f"{rendezvous.address}:{rendezvous.port}"
            if store is None:
                raise PeerLost(f"{what} at {at} failed: the rendezvous was closed")
        else:
            at = f"{address}:{port}"
        try:
            if joining is not None:  # a store's client would try again until its timeout, in a thread that nothing can end
                socket.create_connection((address, port), deadline.remaining(what)).close()
            if rendezvous is None:
                store = _c10d.TCPStore(address, port, world_size, is_master=False, timeout=_timeout(deadline, what))
            store.set_timeout(_timeout(deadline, what))
            # Three prefixes: the engines' own, then torch's for the group, then torch's for the device.
            inner = _c10d.PrefixStore(f"{_FIRST_DEVICE[backend]}/", _c10d.PrefixStore(f"{name}/", _c10d.PrefixStore(name, store)))
            timeout = _timeout(deadline, what)
            if backend == "gloo":
                made = _gloo(inner, rank, world_size, timeout, interface)
            else:
                made = _nccl(inner, rank, world_size, device, priority)
        except (RuntimeError, ValueError, OSError) as error:
            store = inner = None  # with this frame, the error that is raised would keep their connections
            text = _first_line(error)
            # "timed out", "wait timeout after"; a store that answered and then went away is no longer received from
            slow = "time" in text.lower() or (isinstance(error, dist.DistNetworkError) and "recv" not in text)
            kind = DeadlineExceeded if slow else PeerLost
            if rendezvous is None:
                # Sent to others, the reason would reveal what listens at an address that they gave.
                _log.warning("%s at %a port %d failed: %s", what, address, port, text)
                text = "this process's own log says why"
            raise kind(f"{what} at {at} failed: {text}") from error.with_traceback(None)
        return ProcessGroup(name, backend, rank, world_size, made, (store, rendezvous))

    # Rank 0 waits at its own store, whose close ends the wait. The others wait for somebody else's.
    return meet() if rendezvous is not None else _in_time(meet, joining, deadline, f"{what} at {address}:{port}")


_joining = threading.Semaphore(_MOST_JOINING)


def _in_time(meet: Callable[[], ProcessGroup], given_up: Future[None] | None, deadline: Deadline, what: str) -> ProcessGroup:
    """Run ``meet`` in a thread and wait for it until ``deadline``, or until ``given_up`` is done.

    A store's client tries again while no store listens, but goes on after its timeout, and waits for ever for the first answer of a
    listener that is no store. A thread that is late is left behind and closes what it makes; there are never many of them.
    """
    if not _joining.acquire(blocking=False):
        raise TransportUnavailable(f"{_MOST_JOINING} earlier attempts to join a group still wait for an answer; try again later")
    attempt = in_daemon_thread(meet, "weightsync-join")
    attempt.add_done_callback(lambda _: _joining.release())
    try:
        with OnFailure(attempt.add_done_callback, _close_late):
            return deadline.result(attempt, what, given_up)
    except Aborted:
        raise PeerLost(f"{what} was given up") from None
    finally:
        del attempt  # its error's traceback refers to this frame


def _close_late(attempt: Future[ProcessGroup]) -> None:
    if attempt.exception() is None:
        attempt.result().close()


def _one_by_one(tensors: Sequence[torch.Tensor]) -> Callable[[Enqueue], None]:
    def work(enqueue: Enqueue) -> None:
        for tensor in tensors:
            enqueue(tensor)

    return work


def _broadcast(process_group: Any, tensor: torch.Tensor, timeout: timedelta) -> Any:  # noqa: ANN401 - private to torch
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = _ROOT, 0
    options.timeout = timeout
    return process_group.broadcast([_as_bytes(tensor)], options)


def _through_gloo(process_group: Any, tensors: Sequence[torch.Tensor], deadline: Deadline, what: str) -> None:  # noqa: ANN401
    works: list[Any] = []
    try:
        for tensor in tensors:
            works.append(_broadcast(process_group, tensor, _timeout(deadline, what)))
        while works:
            works[0].wait(_timeout(deadline, what))
            del works[0]
    finally:
        works.clear()  # a work that is kept would keep connections open


def _through_nccl(
    process_group: Any,  # noqa: ANN401 - private to torch
    device: torch.device,
    work: Callable[[Enqueue], None],
    deadline: Deadline,
    what: str,
    over: threading.Event,
) -> None:
    """Do ``work`` on another thread, wait for it and for the GPU, and abort when the deadline comes or ``over`` is set.

    An abort does not end the wait for peers that never came, in which the thread is then left behind. Torch's own timeout is not
    used: its watchdog answers one by dumping its records and ending the process, at the peers too.
    """
    wait_for_device(device, deadline, f"{what}: what fills or last used its memory")
    own: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    errors: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(own):
                work(lambda tensor: _broadcast(process_group, tensor, _FOREVER).wait())
                torch.cuda.current_stream(device).synchronize()
        except Exception as error:  # noqa: BLE001 - raised again by who waits
            errors.append(error.with_traceback(None))  # which would keep this frame, and so buffers
        finally:
            done.set()
            over.set()

    thread = threading.Thread(target=run, name="weightsync-nccl", daemon=True)
    thread.start()
    in_time = over.wait(deadline.remaining(what))
    if not done.is_set():
        process_group.abort()
        thread.join(_ABORT_SECONDS)
        errors.clear()
        if in_time:
            raise PeerLost(f"{what} was ended: the group was destroyed")
        raise DeadlineExceeded(f"{what} did not finish within {deadline.seconds:g} s")
    thread.join(_ABORT_SECONDS)  # it has nothing more to do
    if errors:
        process_group.abort()  # what was queued would wait for its peers
        raise errors.pop()  # one that stays in the list would keep this frame


def _gloo(store: Any, rank: int, world_size: int, timeout: timedelta, interface: str) -> Any:  # noqa: ANN401 - private to torch
    if not interface:
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=interface)]
    options._timeout, options._threads = timeout, 2
    return kind(store, rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int, device: torch.device | None, priority: bool) -> Any:  # noqa: ANN401
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = priority
    options._timeout = _FOREVER  # deadlines are kept here: see _through_nccl
    with torch.cuda.device(device):
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as ``uint8``: a broadcast moves bytes, and gloo knows fewer dtypes than torch."""
    if not tensor.is_contiguous():
        raise ConfigurationError(f"a tensor of strides {tensor.stride()} cannot be broadcast in place; make it contiguous")
    return tensor.detach().reshape(-1).view(torch.uint8)


def _timeout(deadline: Deadline, what: str) -> timedelta:
    return timedelta(seconds=max(deadline.remaining(what), 0.001))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
