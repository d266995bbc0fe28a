"""What a process holds, and what a machine does: counted before and after, from the outside."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Held", "grown", "held", "machine"]

_UCX_SEGMENTS = "/dev/shm/ucx_shm_posix_"  # of a NIXL agent: their names are random, and their number follows the load
_RESIDENT = 48 << 20  # bytes by which a process may grow: allocators keep what they once had


@dataclass(frozen=True)
class Held:
    """File descriptors by kind, threads, and resident bytes of one process."""

    descriptors: Counter[str]
    threads: int
    resident: int


def held(pid: int) -> Held:
    """What process ``pid`` holds now."""
    root = Path(f"/proc/{pid}")
    kinds: Counter[str] = Counter()
    for link in (root / "fd").iterdir():
        with suppress(OSError):
            kind = os.readlink(link).split(":")[0]
            if not kind.startswith(_UCX_SEGMENTS):  # an agent that stays also has sockets, pipes and event descriptors
                kinds[kind] += 1
    pages = int((root / "statm").read_text().split()[1])
    return Held(kinds, sum(1 for _ in (root / "task").iterdir()), pages * os.sysconf("SC_PAGE_SIZE"))


def grown(before: Held, pid: int, seconds: float = 5.0, spare_threads: int = 0) -> list[str]:
    """What ``pid`` holds more than ``before``, once it had ``seconds`` seconds to let go; so many threads more are no news."""
    pause, left = threading.Event(), seconds
    while True:
        now = held(pid)
        more = now.descriptors - before.descriptors
        found = [f"holds {count} more {kind}" for kind, count in more.items()]
        if now.threads > before.threads + spare_threads:
            found.append(f"has {now.threads} threads, not {before.threads}")
        if now.resident > before.resident + _RESIDENT:
            found.append(f"has {now.resident >> 20} MiB resident, not {before.resident >> 20}")
        if not found or left <= 0:
            return found
        pause.wait(0.1)
        left -= 0.1


def machine() -> set[str]:
    """What of ours is left on this machine: shared memory, and abstract sockets of this process and those that it started.

    Other programs on the same machine may use weightsync at the same time.
    """
    found = {f"shared memory {path}" for path in Path("/dev/shm").glob("weightsync*")}
    ours = set(_sockets_of(_family(os.getpid())))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        *_, inode, name = line.split()
        if name.startswith("@weightsync") and inode in ours:
            found.add(f"socket {name}")
    return found


def _family(root: int) -> set[int]:
    """``root``, its children, their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has just ended
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, queue = set[int](), [root]
    while queue:
        found.add(one := queue.pop())
        queue += children.get(one, [])
    return found


def _sockets_of(pids: set[int]) -> Iterator[str]:
    """Inodes of the sockets that these processes hold."""
    for pid in pids:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    kind, _, inode = os.readlink(link).partition(":")
                    if kind == "socket":
                        yield inode.strip("[]")
