"""Encrypted data sockets: TLS 1.3 agrees on keys, records of AES-256-GCM carry the rest.

Each publisher makes a certificate when it starts and deletes it when it ends. No authority signs it. The publisher's address holds
its fingerprint, and readers, who get the address over the control connection, accept no other. Inside TLS the publisher sends two
keys that it draws for this connection, one per direction, and both ends continue in records
(:mod:`weightsync.transports.net.encrypted_records`). There readers prove that they know the run's key
(:mod:`weightsync.transports.net.handshake`). So both ends know who the other is, and every connection has its own keys, which
neither the token nor a recording of the traffic gives away.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, WeightSyncError
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.encrypted_records import KEY_BYTES, LENGTH_BYTES, RECORD_BYTES, Opening, Sealing
from weightsync.transports.net.handshake import ENCRYPTED_ONLY

FINGERPRINT_BYTES = 32
_HANDSHAKE = b"\x16"  # the first byte of every TLS connection
_GREETING = 64  # bytes: more than a reader says in plain text before it waits for an answer
_T = TypeVar("_T")
_SOME = 64 << 10  # bytes of a handshake to take at once
_DAY = datetime.timedelta(days=1)


def publisher_context() -> tuple[ssl.SSLContext, bytes]:
    """TLS context of a publisher, and the SHA-256 fingerprint of its new certificate. Takes a few milliseconds."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "weightsync")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + 3650 * _DAY)  # not checked: it is known by its fingerprint, and gone with the process
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = _modern(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # they would lie unread at a reader, and look as if the publisher had something to say
    _load(context, private + made.public_bytes(serialization.Encoding.PEM))
    return context, hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).digest()


def reader_context() -> ssl.SSLContext:
    """TLS context of a reader, which trusts no authority: :meth:`EncryptedChannel.secure` compares the fingerprint."""
    context = _modern(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _modern(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    # The standard library reads keys from files only. This one has no name, or is open to its owner alone, and never lasts.
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("weightsync-certificate", os.MFD_CLOEXEC), "wb") as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return
    with tempfile.NamedTemporaryFile(prefix="weightsync-") as named:
        named.write(pem)
        named.flush()
        context.load_cert_chain(named.name)


class EncryptedChannel(Channel):
    """A channel of which only the two ends can read or change anything, once :meth:`secure` has returned.

    A publisher's, or with the ``fingerprint`` of the publisher that is meant, a reader's.
    """

    encrypted = True

    def __init__(self, sock: socket.socket, peer: str, context: ssl.SSLContext, fingerprint: bytes | None = None) -> None:
        super().__init__(sock, peer)
        self._context, self._fingerprint = context, fingerprint
        self._sealing: Sealing
        self._opening: Opening
        self._sealed = bytearray()
        self._length = b""  # of the next record, if it came with the last one
        self._left = memoryview(b"")  # of the record that was opened last

    def secure(self, deadline: Deadline) -> None:
        """Encrypt from here on.

        Raises :class:`~weightsync.errors.AuthenticationError` for a peer that does not encrypt, or that is
        another publisher.
        """
        publisher = self._fingerprint is None
        if publisher:
            self._expect_tls(deadline)
        handshake = _Handshake(self._context, publisher, super().send, self._receive_handshake, deadline)
        try:
            handshake.run(handshake.tls.do_handshake)
            if self._fingerprint is not None:
                self._check_certificate(handshake.tls.getpeercert(binary_form=True) or b"")
            # The publisher draws the keys: no third party has them, as only this handshake's two ends read what it sends.
            if publisher:
                keys = secrets.token_bytes(2 * KEY_BYTES)
                handshake.run(lambda: handshake.tls.write(keys))
            else:
                keys = handshake.run(lambda: handshake.tls.read(2 * KEY_BYTES))
                if len(keys) < 2 * KEY_BYTES:
                    raise self.lost()
        except ssl.SSLError as error:
            if self.aborted:
                raise self.lost() from None
            raise AuthenticationError(f"{self.peer} does not encrypt as this end does (TLS 1.3): {error.reason or error}") from None
        # Nothing of the next record can have come with the handshake: the publisher waits for the reader, who waits for the keys.
        ours, theirs = (keys[:KEY_BYTES], keys[KEY_BYTES:]) if publisher else (keys[KEY_BYTES:], keys[:KEY_BYTES])
        self._sealing, self._opening = Sealing(ours), Opening(theirs, self.peer)

    def _check_certificate(self, certificate: bytes) -> None:
        if not hmac.compare_digest(hashlib.sha256(certificate).digest(), self._fingerprint or b""):
            raise AuthenticationError(
                f"{self.peer} shows another certificate than its address says: it was restarted, or another process is between"
            )

    def _expect_tls(self, deadline: Deadline) -> None:
        first = self._receive_handshake(1, deadline, socket.MSG_PEEK)
        if first == _HANDSHAKE:
            return
        with suppress(OSError):
            self.socket.recv(_GREETING)
            self.socket.send(ENCRYPTED_ONLY)
        raise AuthenticationError(f"{self.peer} came without encryption")

    def _receive_handshake(self, most: int, deadline: Deadline, flags: int = 0) -> bytes:
        return self.receive_some(most, deadline, "a TLS handshake with", flags)

    def receive_into(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """See :meth:`Channel.receive_into`. Also raises :class:`~weightsync.errors.AuthenticationError` for what was altered."""
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                part, in_place = self.receive_part(len(buffer) - done, deadline, buffer[done:])
                if not in_place:
                    buffer[done : done + len(part)] = part
                done += len(part)

    def receive_part(self, most: int, deadline: Deadline, into: memoryview) -> tuple[memoryview, bool]:
        """Return what is left of a record, or the next one, which lies in ``into`` if it fits there.

        Raises as :meth:`receive_into` does; ``into`` then holds bytes that are not authenticated.
        """
        if not self._left:
            if not self._length:
                first = bytearray(LENGTH_BYTES)
                super().receive_into([memoryview(first)], deadline)
                self._length = bytes(first)
            length, self._length = self._length, b""
            plain, count = self._opening.sizes(length)
            following = LENGTH_BYTES if plain < most else 0  # another record is due: its length comes in the same call
            if len(self._sealed) < count + following:
                self._sealed = bytearray(count + following)
            received = memoryview(self._sealed)[: count + following]
            super().receive_into([received], deadline)
            self._length = bytes(received[count:])
            if plain <= min(len(into), most):
                return self._opening.open(length, received[:count], into[:plain]), True
            self._left = self._opening.open(length, received[:count])
        part, self._left = self._left[:most], self._left[most:]
        return part, False

    def send(self, buffers: Sequence[memoryview | bytes], deadline: Deadline, more: bool = False) -> None:
        """See :meth:`Channel.send`."""
        for given in buffers:
            buffer = memoryview(given)
            for start in range(0, len(buffer), RECORD_BYTES):
                plain, began = buffer[start : start + RECORD_BYTES], time.perf_counter()
                super().send([self._sealing.seal(plain)], deadline, more)
                self._sealing.compression.sent(plain, time.perf_counter() - began)


class _Handshake:
    """TLS over a channel for as long as it takes to agree on keys; it never reads more of the stream than has come."""

    def __init__(
        self,
        context: ssl.SSLContext,
        publisher: bool,
        send: Callable[[Sequence[bytes], Deadline], None],
        receive: Callable[[int, Deadline], bytes],
        deadline: Deadline,
    ) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=publisher)
        self._send, self._receive, self._deadline = send, receive, deadline

    def run(self, step: Callable[[], _T]) -> _T:
        """What ``step`` returns, once the peer has sent what it needs."""
        while True:
            try:
                answer = step()
            except ssl.SSLWantReadError:
                self._flush()
                self._incoming.write(self._receive(_SOME, self._deadline))
            except ssl.SSLError:
                with suppress(WeightSyncError):
                    self._flush()  # the alert that tells the peer why
                raise
            else:
                self._flush()
                return answer

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._send([self._outgoing.read()], self._deadline)
