"""Memory that other processes may map: reserved before use, resident, sealed, and nameless so that nothing can be left behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from weightsync import forks
from weightsync.arrays import Bytes
from weightsync.errors import ProtocolError, SharedMemoryTooSmall
from weightsync.transports.hostinfo import text_of

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in the fcntl module
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EFAULT, errno.EDQUOT)


class Memory:
    """A mapping and, where it can be shared, its file descriptor. A forked child has zeros in its place, and no descriptor."""

    def __init__(self, mapping: mmap.mmap, fd: int | None) -> None:
        self.map = mapping
        self.fd = fd
        _keep_from_children(mapping, fd)

    def close(self) -> None:
        """Close the descriptor and unmap; where views are held, the mapping goes with the last of them. Safe twice."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)
        with suppress(BufferError):
            self.map.close()


def _keep_from_children(mapping: mmap.mmap, fd: int | None) -> None:
    """A forked child (a data loader's worker) must not keep a trainer's shared memory in use after the trainer is gone."""
    held = np.frombuffer(mapping, np.uint8)
    address, nbytes = int(held.ctypes.data), held.nbytes
    identity = None if fd is None else (os.fstat(fd).st_dev, os.fstat(fd).st_ino)

    def give_up(mapping: mmap.mmap) -> None:
        if not mapping.closed:
            forks.give_up_memory(address, nbytes)
        if identity is not None:
            forks.silence_file(*identity)  # a mapping of Python's has a descriptor of its own

    forks.in_children(mapping, give_up)


def _cgroup_limits() -> Iterator[int]:
    """Bytes that are left in each memory control group that this process is in (versions 1 and 2, all ancestors)."""
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        if controllers:
            root, limit, usage = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        cache = "total_inactive_file" if controllers else "inactive_file"
        inside = Path(path.lstrip("/"))
        for group in (root / inside, *(root / parent for parent in inside.parents)):
            with suppress(OSError, ValueError):  # "max", or a group that this namespace does not show
                left = int((group / limit).read_text()) - int((group / usage).read_text())
                reclaimable = re.search(rf"^{cache} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                yield left + (int(reclaimable[1]) if reclaimable else 0)


def available_bytes() -> int | None:
    """Bytes of memory that this process could still get without being killed for it, or ``None`` if unknown."""
    limits = list(_cgroup_limits())
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", text_of("/proc/meminfo"), re.MULTILINE)
    if match:
        limits.append(int(match[1]) << 10)
    return max(min(limits), 0) if limits else None


def _too_small(nbytes: int, reason: str) -> SharedMemoryTooSmall:
    free = available_bytes()
    have = f"{free:,} bytes are available" if free is not None else "how much is available is unknown"
    return SharedMemoryTooSmall(
        f"a region for this rank's shards needs {nbytes:,} bytes of shared memory ({reason}), and {have}; raise the memory "
        "limit of the container or job (docker --memory, the pod's resources.limits.memory, ulimit -f), free memory on this host, "
        "or spread the model over more ranks so that each holds fewer bytes"
    )


def allocate(nbytes: int) -> Memory:
    """``nbytes`` zero bytes, resident; on Linux a sealed memfd that can only ever be mapped read-only by others.

    Raises :class:`~weightsync.errors.SharedMemoryTooSmall`, instead of a SIGBUS or a visit of the OOM killer later.
    """
    free = available_bytes()
    if free is not None and nbytes > free:
        raise _too_small(nbytes, "checked before allocating")
    if not (sys.platform == "linux" and hasattr(os, "memfd_create")):
        try:
            return Memory(mmap.mmap(-1, nbytes), None)
        except (OSError, ValueError, OverflowError) as error:
            raise _too_small(nbytes, str(error)) from error
    fd = os.memfd_create("weightsync-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes)
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        try:
            # Through the mapping first: only so does the kernel use huge pages, where it is allowed to, and fill the page table.
            mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno in _NO_ROOM:
                mapping.close()
                raise
        os.posix_fallocate(fd, 0, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno not in _NO_ROOM:
            raise
        raise _too_small(nbytes, str(error)) from error
    memory = Memory(mapping, fd)
    _seal(fd)
    return memory


def _seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with suppress(OSError):  # an older kernel: readers still get a descriptor that is open for reading only
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def reopen_read_only(fd: int) -> int:
    """A new descriptor of the same memory that cannot be mapped for writing."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(fd)  # no /proc here: the seals alone must keep readers from writing


def map_read_only(fd: int, nbytes: int) -> Bytes:
    """The first ``nbytes`` bytes of ``fd``, ``uint8[nbytes]``, read-only; unmapped when the last view of it goes.

    Raises :class:`~weightsync.errors.ProtocolError` if the memory is smaller, or could be made so while it is read (a SIGBUS).
    """
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed or os.fstat(fd).st_size < nbytes:
        raise ProtocolError(f"the descriptor that was handed over is not a sealed memory file of {nbytes:,} bytes")
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapping = mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ)
    _keep_from_children(mapping, fd)
    return np.frombuffer(mapping, np.uint8)
