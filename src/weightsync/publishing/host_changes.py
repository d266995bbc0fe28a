"""What changed in a region of host memory from one version to the next, listed in the region behind the shards."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigurationError, SharedMemoryTooSmall
from weightsync.protocol.messages import ChangedWords
from weightsync.tensors.changes import blocks_of, find
from weightsync.transports.host.memory import available_bytes

_LINE = 64
_SHARE = 4  # lists take at most this part of the shards' bytes, unless a number says otherwise


class HostChanges:
    """Keeps the words of the last version of a region, and lists in each version those that differ from them.

    The region holds ``nbytes`` of shards, then the ends of the lists, then the lists, up to :attr:`end`. ``most`` are the most
    bytes that lists may take; ``True`` stands for a quarter of the shards' bytes. A version with more changes is published without.
    The words before take as much memory as the shards.

    Raises:
        ConfigurationError: ``most`` is negative.
    """

    def __init__(self, nbytes: int, most: bool | int) -> None:
        if most < 0:
            raise ConfigurationError(f"deltas is True, or the most bytes that the changes of a version may take, not {most}")
        room = nbytes // _SHARE if most is True else int(most)
        self._nbytes, self._words = nbytes, room // 2
        self._ends = nbytes
        self._payload = -(-(nbytes + 4 * blocks_of(nbytes)) // _LINE) * _LINE
        self.end = self._payload + -(-2 * self._words // _LINE) * _LINE
        """Bytes of the region."""
        self._before: npt.NDArray[np.uint8] | None = None
        self._order: tuple[int, int] | None = None
        self.changed: ChangedWords | None = None
        """The lists of the version that was placed last; ``None`` if there are none."""

    def update(self, region: npt.NDArray[np.uint8], stop: npt.NDArray[np.int8]) -> None:
        """List the changes of what is in ``region`` (``uint8[end]``) now. :meth:`placed` must follow, if the version exists.

        Raises:
            Aborted: Another thread set ``stop[0]``.
            SharedMemoryTooSmall: There is no memory for the words before.
        """
        order, self._order, self.changed = self._order, None, None
        shards = region[: self._nbytes]
        if self._before is None:
            free = available_bytes()
            if free is not None and free < self._nbytes:
                raise SharedMemoryTooSmall(
                    f"deltas keep the last version of this rank's shards, {self._nbytes:,} bytes, and {free:,} bytes are available"
                )
            self._before = shards.copy()
        elif order is None:
            self._before[:] = shards
        else:
            ends = region[self._ends : self._ends + 4 * blocks_of(self._nbytes)].view(np.uint32)
            used = find(self._before, shards, ends, region[self._payload :].view(np.uint16)[: self._words], stop)
            if used is not None:
                self.changed = ChangedWords(*order, self._nbytes, self._ends, self._payload, used)

    def placed(self, epoch: int, number: int) -> None:
        """The version that :meth:`update` looked at has this epoch and number: the base of the next one."""
        self._order = epoch, number
