"""Compression of encrypted records, where measurement says that the network is slower than zstd.

What crosses are words of two or four bytes: weights, and of deltas places and values. Their upper bytes, of signs and exponents or
of ascending places, repeat; their lower ones hardly do. So all lower bytes of 16-bit words come before all upper ones, and zstd
(level 1) compresses both: lists of bfloat16 words, 1 % of which changed at random, from 4.0 to 2.8 bytes a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import zstandard

from weightsync.errors import ProtocolError

_LEAST_BYTES = 64 << 10
"""A shorter record is sent as it is: a header, or the end of something."""
_WINDOW = 2 << 20  # plain bytes that one decision is for
_TRIAL_WINDOWS = 32  # between two trials while records go as they are; a trial compresses 64 KiB, less than 1 % of their time
_PLAIN_WINDOWS = 64  # between two windows as they are while records are compressed
_PAYS = 0.9


def packed(plain: memoryview) -> bytes:
    """Compress an even number of bytes."""
    return zstandard.ZstdCompressor(level=1).compress(np.frombuffer(plain, np.uint8).reshape(-1, 2).T.tobytes())


def unpacked(content: memoryview, into: memoryview) -> None:
    """Inverse of :func:`packed`, if the size of ``into`` is the original's.

    Raises:
        ProtocolError: ``content`` is nothing that was packed, or of another size. No more than that size was allocated.
    """
    try:
        if zstandard.frame_content_size(content) != len(into) or len(into) % 2:
            raise zstandard.ZstdError("another size")
        plain = zstandard.ZstdDecompressor().decompress(content, max_output_size=len(into))
    except zstandard.ZstdError as error:
        raise ProtocolError(f"the peer sent a compressed record that is none: {error}") from None
    np.frombuffer(into, np.uint8).reshape(-1, 2)[:] = np.frombuffer(plain, np.uint8).reshape(2, -1).T


class Compression:
    """Chooses, for one direction of one connection, whether records are compressed: by what sending them took, either way.

    Records go as they are at first. They are compressed once a sample shows that this takes less time than sending them did, and
    for as long as they leave faster. ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.active = False
        """Whether the next records are compressed."""
        self._seconds = {False: 0.0, True: 0.0}  # of the last window either way, for a plain byte
        self._spent, self._size = 0.0, 0
        self._windows = _TRIAL_WINDOWS - 4  # since the last trial; the first ones only fill the system's buffers

    def pack(self, plain: memoryview) -> memoryview | bytes:
        """What to send for a record."""
        if not self.active or len(plain) < _LEAST_BYTES or len(plain) % 2:
            return plain
        content = packed(plain)
        return content if len(content) < len(plain) else plain

    def sent(self, plain: memoryview, seconds: float) -> None:
        """Note that packing and sending a record took so long, and decide about the next ones."""
        if len(plain) < _LEAST_BYTES:
            return
        self._spent, self._size = self._spent + seconds, self._size + len(plain)
        if self._size < _WINDOW:
            return
        self._seconds[self.active] = self._spent / self._size
        self._spent, self._size, self._windows = 0.0, 0, self._windows + 1
        if self.active and self._seconds[True] >= _PAYS * self._seconds[False]:
            self.active, self._windows = False, 0
        elif self.active and self._windows >= _PLAIN_WINDOWS:
            self.active = False  # for a window
        elif not self.active and self._windows >= _TRIAL_WINDOWS:
            self.active, self._windows = self._promises(plain[:_LEAST_BYTES]), 0

    def _promises(self, sample: memoryview) -> bool:
        """Whether compressing is worth a window: the sample gets shorter, in less time than its bytes took on their way."""
        began = self._clock()
        shorter = len(packed(sample)) < _PAYS * len(sample)
        return shorter and (self._clock() - began) / len(sample) < self._seconds[False]
