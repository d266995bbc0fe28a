"""Isolation of forked children from the objects that they inherit.

A child of :func:`os.fork`, such as a data loader's worker, has a copy of every object but none of the threads, and it shares
sockets and shared memory with its parent. Without this module the child's exit would close what the parent still serves, and a
child that outlives its parent would hide the parent's death from its peers.

Two rules keep the processes apart. An object on which others depend remembers the process that made it (:class:`Origin`) and does
nothing in another. Right after a fork the child gives up its share of everything registered here: sockets of an :func:`event_loop`,
descriptors, mappings (:func:`in_children`, :func:`silence`, :func:`give_up_memory`).
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import selectors
import stat
import sys
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from weightsync.errors import ConfigurationError

T = TypeVar("T")

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; not in the mmap module
_ZEROS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_actions: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Origin:
    """The process that made an object, which checks it before any externally visible action."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """Whether this process is a forked child of the one that made the object."""
        return os.getpid() != self._pid

    def require(self, what: str) -> None:
        """Reject a call in a forked child.

        Args:
            what: Name of the object.

        Raises:
            ConfigurationError: This process is a forked child.
        """
        if self.elsewhere:
            raise ConfigurationError(
                f"{what} belongs to process {self._pid}, but this is its forked child {os.getpid()}: use it in that process, or "
                "make another one in this process"
            )


def in_children(owner: T, action: Callable[[T], None]) -> None:
    """Call ``action(owner)`` in every child that this process forks while ``owner`` exists.

    ``action`` must not refer to ``owner``, take locks or need threads. If it raises OSError, that is ignored. The first other error
    is printed after all actions have run.
    """
    _actions[owner] = action


def _forked() -> None:
    errors: list[Exception] = []
    for owner, action in list(_actions.items()):
        try:
            action(owner)
        except OSError:
            continue
        except Exception as error:  # noqa: BLE001 - the other actions must still run
            errors.append(error)
    _actions.clear()
    if errors:
        raise errors[0]  # Python prints it and continues


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def silence(fd: int) -> None:
    """Replace a descriptor that this child shares with its parent by ``/dev/null``.

    The number stays in use, so objects that still hold it can never reach another file through it.
    """
    try:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        os.close(fd)  # out of descriptors
        return
    try:
        os.dup2(nothing, fd, inheritable=False)
    finally:
        os.close(nothing)


def silence_file(device: int, inode: int) -> None:
    """Call :func:`silence` for all descriptors of one file, including those inside Python's own objects (Linux)."""
    with suppress(FileNotFoundError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):
                status = os.fstat(int(entry.name))
                if (status.st_dev, status.st_ino) == (device, inode):
                    silence(int(entry.name))


def give_up_memory(address: int, nbytes: int) -> None:
    """Replace a mapping that this child shares with its parent by private zeroed memory (Linux).

    So the parent's memory is freed when the parent ends, views of it stay accessible, and no other mapping can take its addresses.
    ``MADV_DONTFORK`` would instead leave a hole in which any access crashes.
    """
    if sys.platform == "linux":
        _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _ZEROS | _MAP_FIXED | _MAP_NORESERVE, -1, 0)


def keep_for_ever(what: object) -> None:
    """Never destroy ``what`` in this child, because its destructor would wait for threads that only the parent has."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


class _Selector(selectors.DefaultSelector):
    """Selector that remembers all registered sockets, so that a child can find those that are still open."""

    def __init__(self) -> None:
        super().__init__()
        self._inodes: dict[int, int] = {}
        in_children(self, _Selector._after_fork)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:  # noqa: ANN401
        """See :class:`selectors.BaseSelector`."""
        key = super().register(fileobj, events, data)
        self._inodes[key.fd] = os.fstat(key.fd).st_ino
        return key

    def _after_fork(self) -> None:
        # The event queue first: the parent shares it, and an event that the child takes would be lost to the parent.
        if isinstance(self, selectors.EpollSelector):
            with suppress(ValueError, OSError):
                silence(self.fileno())
        for fd, inode in self._inodes.items():
            with suppress(OSError):
                status = os.fstat(fd)
                if status.st_ino == inode and stat.S_ISSOCK(status.st_mode):
                    silence(fd)


def event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop whose sockets are closed in forked children."""
    return asyncio.SelectorEventLoop(_Selector())


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` like :func:`asyncio.run`, on an :func:`event_loop`."""
    with asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(main)
