"""Records: what an encrypted channel sends once TLS has agreed on keys. AES-256-GCM over as much as a processor's cache holds.

A record is its plain length and that of the ciphertext (u32, little-endian), which differ if it is compressed
(:mod:`weightsync.transports.net.compression`), the ciphertext, and a tag of 16 bytes that authenticates all three. Each direction
of each connection has a key of its own, whose nonce counts the records from zero: one that is changed, repeated, left out, moved,
cut short or sent back to where it came from does not open. After :data:`RECORDS_PER_KEY` records the next key is derived from the
key and the key is dropped.

TLS does the same with records of 16 KiB, each a call of the operating system and of Python at either end, which took most of the
time: see ``docs/benchmarks/cpu-transports.md``.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from weightsync.errors import AuthenticationError
from weightsync.transports.net.compression import Compression, unpacked

KEY_BYTES = 32
TAG_BYTES = 16
LENGTH_BYTES = 8
RECORD_BYTES = 512 << 10
"""Most plain bytes of a record."""
RECORDS_PER_KEY = 1 << 17
"""At most 64 GiB, so 2^32 blocks: an attacker's advantage over a key stays below 2^-60."""
_LENGTH = struct.Struct("<II")
_NEXT = b"weightsync: the next key of a channel"


class _Keys:
    """The key of one direction, and the nonce that is due."""

    def __init__(self, key: bytes) -> None:
        self._take(key)

    def _take(self, key: bytes) -> None:
        self._key, self._cipher, self._count = key, AESGCM(key), 0

    def due(self) -> tuple[AESGCM, bytes]:
        """A cipher and a nonce that are used once."""
        if self._count == RECORDS_PER_KEY:
            self._take(hmac.digest(self._key, _NEXT, hashlib.sha256))
        self._count += 1
        return self._cipher, (self._count - 1).to_bytes(12, "little")


class Sealing(_Keys):
    """The sender's end of a direction. Not thread-safe."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._record = bytearray(LENGTH_BYTES + RECORD_BYTES + TAG_BYTES)
        self.compression = Compression()

    def seal(self, plain: memoryview) -> memoryview:
        """Return the record of at most :data:`RECORD_BYTES` bytes. It is valid until the next call."""
        cipher, nonce = self.due()
        content = self.compression.pack(plain)
        record = memoryview(self._record)[: LENGTH_BYTES + len(content) + TAG_BYTES]
        lengths = _LENGTH.pack(len(plain), len(content))
        record[:LENGTH_BYTES] = lengths
        cipher.encrypt_into(nonce, content, lengths, record[LENGTH_BYTES:])
        return record


class Opening(_Keys):
    """The receiver's end of a direction, in which ``peer`` sends. Not thread-safe."""

    def __init__(self, key: bytes, peer: str) -> None:
        super().__init__(key)
        self._peer = peer
        self._plain = bytearray()

    def sizes(self, lengths: bytes | bytearray | memoryview) -> tuple[int, int]:
        """Return the plain bytes of a record, and how many follow its lengths.

        Raises :class:`~weightsync.errors.AuthenticationError` for impossible lengths.
        """
        plain, content = _LENGTH.unpack(lengths)
        if not 0 < content <= plain <= RECORD_BYTES:
            raise AuthenticationError(f"{self._peer} announced a record of {plain:,} bytes: the connection was altered")
        return plain, content + TAG_BYTES

    def open(self, lengths: bytes | bytearray | memoryview, sealed: memoryview, into: memoryview | None = None) -> memoryview:
        """Return the plain bytes of a record: ``into``, which has their size, or a buffer that is valid until the next call.

        Raises :class:`~weightsync.errors.AuthenticationError` unless this is the record that is due, and
        :class:`~weightsync.errors.ProtocolError` if the peer itself compressed it wrongly.
        """
        cipher, nonce = self.due()
        nbytes, content = _LENGTH.unpack(lengths)
        compressed = content < nbytes
        # Memory grows with what was received, not with what was announced, before the peer has shown that it has the key.
        opened = memoryview(bytearray(content)) if compressed else self._room(nbytes, into)
        try:
            cipher.decrypt_into(nonce, sealed, lengths, opened)
        except InvalidTag:
            raise AuthenticationError(f"a record is not the one that {self._peer} sent: the connection was altered") from None
        if not compressed:
            return opened
        plain = self._room(nbytes, into)
        unpacked(opened, plain)
        return plain

    def _room(self, nbytes: int, into: memoryview | None) -> memoryview:
        if into is not None:
            return into
        if len(self._plain) < nbytes:
            self._plain = bytearray(nbytes)
        return memoryview(self._plain)[:nbytes]
