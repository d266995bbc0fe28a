"""Host memory that kernels read and write where it is."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import torch

from weightsync.arrays import Bytes
from weightsync.errors import TransportUnavailable

_MAPPED_FOR_ALL = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
_users: Counter[int] = Counter()
"""By address. CUDA registers memory only once: a region is copied to by one user, and sent from by another."""
_lock = threading.Lock()


class Pinned:
    """Keeps ``memory`` in place and readable by kernels on ``device``, at :attr:`address`, until closed.

    Raises :class:`~weightsync.errors.TransportUnavailable` where the driver refuses (locked memory is limited, say).
    """

    def __init__(self, memory: Bytes, device: torch.device) -> None:
        self._memory: Bytes | None = None
        self.address = int(memory.ctypes.data)
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if not memory.nbytes:
            return
        with _lock, torch.cuda.device(device):
            code = 0
            if not _users[self.address]:
                code = int(self._runtime.cudaHostRegister(self.address, memory.nbytes, _MAPPED_FOR_ALL))
            if not code:
                _users[self.address] += 1
                self._memory = memory
        if code:
            with suppress(RuntimeError):
                torch.zeros(1, device=device)  # CUDA raises the error again in whatever is launched next
            raise TransportUnavailable(
                f"{memory.nbytes:,} bytes of host memory cannot be read by {device} (CUDA error {code}): raise the limit of locked "
                "memory (ulimit -l), or keep the trainer's shards on its GPU"
            )

    def close(self) -> None:
        """Let go of it. Nothing may be reading it. Safe twice."""
        with _lock:
            memory, self._memory = self._memory, None
            if memory is not None:
                _users[self.address] -= 1
                if not _users[self.address]:
                    del _users[self.address]
                    self._runtime.cudaHostUnregister(self.address)
