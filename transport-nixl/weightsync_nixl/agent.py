"""NIXL as this project uses it: an agent that registers memory and reads a peer's by prepared lists of descriptors.

NIXL (https://github.com/ai-dynamo/nixl) drives UCX: RDMA between hosts, NVLink, shared memory or TCP, whatever connects two agents.
What agents must know of each other travels over our own authenticated channel: NIXL's listener, etcd and its serialisers (which
pickle) are not used.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from weightsync import forks
from weightsync.arrays import Bytes, Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, PeerLost, ProtocolError, TransportError, TransportUnavailable
from weightsync.protocol.messages import Memory

_MODULES = ("nixl_cu13", "nixl_cu12")
Pieces = tuple[Memory, Int64, int]
"""A memory, address and bytes of each piece in it (``int64[n, 2]``), and the CUDA device of memory of a GPU."""

_SEGMENTS: dict[Memory, str] = {"host": "DRAM", "cuda": "VRAM"}
_TRIES = 4  # UCX opens each network device that it lists, and fails if one is removed in between: a container's that ends, say
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
_LATE = 1 / 16  # of a transfer: what looking at its state too late may cost
_SURE = 7 / 8  # of the time that it took before: not looked at so long


def nixl_problem() -> str | None:
    """Return why NIXL cannot be used here, or ``None``. Imports nothing."""
    if any(find_spec(name) for name in _MODULES):
        return None
    return "NIXL is not installed: pip install nixl-cu13"


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Return the names of this host's RDMA devices with an active port, as the kernel lists them."""
    names = []
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        states = (port / "state" for port in (device / "ports").glob("*"))
        if any("ACTIVE" in state.read_text() for state in states if state.is_file()):
            names.append(device.name)
    return tuple(names)


def network_devices() -> tuple[str, ...]:
    """Return the names by which UCX knows this host's network devices: interfaces and RDMA devices."""
    interfaces = [name for _, name in socket.if_nameindex()]
    rdma = Path("/sys/class/infiniband")
    return (*interfaces, *(sorted(path.name for path in rdma.iterdir()) if rdma.is_dir() else ()))


def _api() -> Any:  # noqa: ANN401 (NIXL has no types)
    # Both log to standard output by default, which belongs to the program. What failed is in the exceptions.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        if find_spec("nixl_cu13"):
            from nixl_cu13 import _api
        else:
            from nixl_cu12 import _api  # type: ignore[no-redef]
    except (ImportError, OSError) as error:
        raise TransportUnavailable(f"NIXL cannot be loaded: {error}") from error
    return _api


class Transfer:
    """One prepared transfer, which may be started any number of times, one after the other. Made by :meth:`Agent.prepare`."""

    def __init__(self, agent: Agent, handle: Any, lists: tuple[Any, ...], peer: str) -> None:  # noqa: ANN401
        self._agent, self._handle, self._lists, self._peer = agent, handle, lists, peer
        self.running = False
        self._seconds = 0.0

    def start(self) -> None:
        """Post it. A small one may be done when this returns. Raises :class:`~weightsync.errors.PeerLost`."""
        self._step("transfer")

    def _step(self, call: str) -> None:
        try:
            state = getattr(self._agent.api, call)(self._handle)
        except Exception as error:  # noqa: BLE001 (NIXL's exceptions have no base but this)
            self.running = False
            raise PeerLost(f"{self._peer} cannot be read: {error}") from _without_frames(error)
        self.running = state == "PROC"
        if state not in ("PROC", "DONE"):
            raise PeerLost(f"{self._peer} cannot be read: its memory is gone or the connection broke")

    def wait(self, deadline: Deadline, stop: threading.Event | None = None) -> None:
        """Return when every byte is in place.

        NIXL offers no call that blocks and no descriptor to select on. So the state is looked at: first when most of the time has
        passed that the transfer took before, then in intervals of a sixteenth of the time so far. Looking more often slows it down.

        Raises:
            PeerLost: The peer is gone.
            DeadlineExceeded: The transfer still runs.
            Aborted: ``stop`` was set; the transfer still runs.
        """
        began = time.monotonic()
        pause = self._seconds * _SURE
        while self.running:
            self._step("check_xfer_state")
            if self.running:
                left = deadline.remaining(f"reading from {self._peer}")
                if (stop or self._agent.closing).wait(min(pause, left)):
                    raise Aborted(f"reading from {self._peer} was aborted")
                pause = min(max((time.monotonic() - began) * _LATE, _SHORTEST_PAUSE), _LONGEST_PAUSE)
        self._seconds = time.monotonic() - began

    def release(self) -> None:
        """Cancel and drop it. Raises :class:`~weightsync.errors.TransportError` if it runs and cannot be cancelled."""
        try:
            self._handle.release()
            for prepared in self._lists:
                prepared.release()
        except Exception as error:  # noqa: BLE001 (NIXL's exceptions have no base but this)
            raise TransportError(f"a transfer from {self._peer} cannot be cancelled: {error}") from _without_frames(error)
        self._handle, self._lists = None, ()  # they refer to the agent


class Agent:
    """A NIXL agent with the backend UCX, for this process. Any thread.

    Args:
        options: Parameters of the backend, passed through.

    Raises:
        TransportUnavailable: NIXL is not installed, or finds no device.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        module = _api()
        self._origin = forks.Origin()
        self._lock = threading.Lock()
        self._registered: list[Any] = []
        self._remotes: dict[str, tuple[bytes, int]] = {}  # metadata and users of each
        self.closing = threading.Event()
        self.name = f"weightsync-{uuid.uuid4().hex}"
        config = module.nixl_agent_config(
            enable_prog_thread=True, backends=[], sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        for tries_left in reversed(range(_TRIES)):
            try:
                self.api = module.nixl_agent(self.name, config)
                self.api.create_backend("UCX", {"ucx_error_handling_mode": "peer", **options})
                break
            except Exception as error:  # noqa: BLE001 (NIXL's exceptions have no base but this)
                if not tries_left:
                    raise TransportUnavailable(
                        f"NIXL finds no way to other hosts with the options {dict(options)}: {error}"
                    ) from _without_frames(error)
        forks.in_children(self, Agent._after_fork)

    def _after_fork(self) -> None:
        """In a forked child: NIXL's threads are the parent's, and destroying its objects would wait for them."""
        forks.keep_for_ever(self.api)

    def register(self, memory: Memory, spans: Int64, device: int = 0) -> Any:  # noqa: ANN401
        """Register memory, so that it can be read, or read into.

        Args:
            memory: Where it lies.
            spans: ``int64[n, 2]``: address and bytes of each span.
            device: CUDA device of memory of a GPU.

        Returns:
            A token for :meth:`deregister`.

        Raises:
            TransportUnavailable: The memory cannot be registered.
        """
        try:
            token = self.api.register_memory(_descriptors(spans, device), _SEGMENTS[memory])
        except Exception as error:  # noqa: BLE001 (NIXL's exceptions have no base but this)
            raise TransportUnavailable(
                f"{int(spans[:, 1].sum()):,} bytes of {memory} memory cannot be registered with NIXL: {error}. It may be limited "
                "(ulimit -l), or allocated with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            ) from _without_frames(error)
        with self._lock:
            self._registered.append(token)
        return token

    def deregister(self, token: Any) -> None:  # noqa: ANN401
        """Undo :meth:`register`. A read that still runs ends with an error."""
        with self._lock:
            self._registered.remove(token)
        self.api.deregister_memory(token)

    @property
    def metadata(self) -> bytes:
        """What a peer must know to read the registered memory; changes with every registration."""
        return bytes(self.api.get_agent_metadata())

    def add(self, metadata: bytes, instead_of: str = "") -> str:
        """Learn of a peer. Every call is matched by a :meth:`remove`.

        Args:
            metadata: The peer's :attr:`metadata`.
            instead_of: The same peer's name, if its metadata may have changed. Nothing prepared with the old may be in use.

        Raises:
            ProtocolError: ``metadata`` is not a peer's, or the peer is in use with other metadata.
        """
        with self._lock:
            if instead_of and self._remotes[instead_of][0] == metadata:
                return instead_of
        if instead_of:
            self.remove(instead_of)
        with self._lock:
            for name, (known, users) in self._remotes.items():
                if known == metadata:
                    self._remotes[name] = known, users + 1
                    return name
            try:
                added = self.api.add_remote_agent(metadata)
            except Exception as error:  # noqa: BLE001 (NIXL's exceptions have no base but this)
                raise ProtocolError(f"the publisher's NIXL agent cannot be used: {error}") from _without_frames(error)
            name = added.decode() if isinstance(added, bytes) else str(added)
            _, users = self._remotes.get(name, (b"", 0))
            self._remotes[name] = metadata, users + 1
            return name

    def remove(self, name: str) -> None:
        """Drop a peer when this was the last :meth:`remove` of its :meth:`add`."""
        with self._lock:
            metadata, users = self._remotes[name]
            if users > 1:
                self._remotes[name] = metadata, users - 1
                return
            del self._remotes[name]
        self.api.remove_remote_agent(name)

    def prepare(self, target: Pieces, name: str, source: Pieces, peer: str) -> Transfer:
        """Prepare a read of registered memory of a peer into registered memory of this process.

        Args:
            target: Where the pieces go.
            name: What :meth:`add` returned.
            source: Where they come from, piece by piece.
            peer: The peer in messages.

        Raises:
            PeerLost: The peer has not registered that memory, or is gone.
        """
        every = np.arange(len(target[1]), dtype=np.int32)
        lists: list[Any] = []
        try:
            for agent, (memory, spans, device) in (("", target), (name, source)):
                lists.append(self.api.prep_xfer_dlist(agent, _descriptors(spans, device), _SEGMENTS[memory]))
            handle = self.api.make_prepped_xfer("READ", lists[0], every, lists[1], every)
        except Exception as error:  # noqa: BLE001 (NIXL's exceptions have no base but this)
            lists.clear()
            raise PeerLost(f"{peer} does not let its memory be read (any more): {error}") from _without_frames(error)
        return Transfer(self, handle, tuple(lists), peer)

    def close(self) -> None:
        """Deregister everything and end the agent's threads and connections. Safe twice; in a forked child: nothing."""
        if self.closing.is_set() or self._origin.elsewhere:
            return
        self.closing.set()
        for token in self._registered:
            self.api.deregister_memory(token)
        self._registered.clear()
        for name in self._remotes:
            self.api.remove_remote_agent(name)
        del self.api


def _without_frames(error: Exception) -> Exception:
    """Return ``error`` without its traceback, whose frames hold NIXL's objects for as long as somebody keeps the error."""
    return error.with_traceback(None)


def _descriptors(spans: Int64, device: int) -> UInt64:
    """``uint64[n, 3]``: address, bytes, device."""
    table = np.empty((len(spans), 3), np.uint64)
    table[:, :2] = spans
    table[:, 2] = device
    return table


def span_of(memory: Bytes) -> Int64:
    """Return address and bytes of an array, ``int64[1, 2]``."""
    return np.array([[memory.ctypes.data, memory.nbytes]], np.int64)
