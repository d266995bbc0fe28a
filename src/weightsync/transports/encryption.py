"""TLS 1.3 on data sockets, with a certificate for each owner that is made when it starts and forgotten when it ends.

No authority signs it: the owner's address holds its fingerprint, and readers, who get the address over the control connection, take
no other. Readers then prove inside of TLS that they know the key (:mod:`weightsync.transports.handshake`), so both ends know who
the other is, and every connection has keys of its own that neither the token nor a recording of the traffic gives away.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import socket
import ssl
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, DeadlineExceeded, PeerLost
from weightsync.transports.frames import Channel
from weightsync.transports.handshake import ENCRYPTED_ONLY

__all__ = ["FINGERPRINT_BYTES", "EncryptedChannel", "owner_context", "reader_context"]

FINGERPRINT_BYTES = 32
_HANDSHAKE = b"\x16"  # the first byte of every TLS connection
_GREETING = 64  # bytes: more than a reader says in plain text before it waits for an answer
_DAY = datetime.timedelta(days=1)


def owner_context() -> tuple[ssl.SSLContext, bytes]:
    """What an owner encrypts with, and the fingerprint (SHA-256) of its new certificate. Takes a few milliseconds."""
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
        .not_valid_after(now + 3650 * _DAY)  # nobody asks: it is known by its fingerprint, and gone with the process
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = _modern(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # they would lie unread at a reader, and look as if its owner had something to say
    _load(context, private + made.public_bytes(serialization.Encoding.PEM))
    return context, hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).digest()


def reader_context() -> ssl.SSLContext:
    """What a reader encrypts with. It believes no authority: see :meth:`EncryptedChannel.secure`."""
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

    An owner's, or with the ``fingerprint`` of the owner that is meant, a reader's.
    """

    encrypted = True

    def __init__(self, sock: socket.socket, peer: str, context: ssl.SSLContext, fingerprint: bytes | None = None) -> None:
        super().__init__(sock, peer)
        self._fingerprint = fingerprint
        self._tls = context.wrap_socket(sock, server_side=fingerprint is None, do_handshake_on_connect=False)
        self.socket = self._tls

    def bound(self, option: int, deadline: Deadline, what: str) -> None:
        """See :meth:`Channel.bound`. TLS goes on after the kernel's timeouts, so Python keeps the time."""
        self._tls.settimeout(deadline.remaining(f"{what} {self.peer}"))

    def secure(self, deadline: Deadline) -> None:
        """Encrypt from here on.

        Raises :class:`~weightsync.errors.AuthenticationError` for a peer that does not encrypt, or is not the owner that is meant.
        """
        self.bound(0, deadline, "a TLS handshake with")
        try:
            if self._fingerprint is None:
                self._expect_tls()
            self._tls.do_handshake()
        except TimeoutError:
            raise DeadlineExceeded(f"{self.peer} did not end its TLS handshake within {deadline.seconds:g} s") from None
        except ssl.SSLEOFError as error:
            raise self.lost(error) from error
        except ssl.SSLError as error:
            if self.aborted:
                raise self.lost() from None
            raise AuthenticationError(f"{self.peer} does not encrypt as this end does (TLS 1.3): {error.reason or error}") from None
        except (OSError, ValueError) as error:
            raise self.lost(error if isinstance(error, OSError) else None) from None
        if self._fingerprint is not None:
            shown = hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()
            if not hmac.compare_digest(shown, self._fingerprint):
                raise AuthenticationError(
                    f"{self.peer} shows another certificate than its address says: it was restarted, or somebody stands in between"
                )

    def _expect_tls(self) -> None:
        first = socket.socket.recv(self._tls, 1, socket.MSG_PEEK)  # the socket's own, below TLS
        if first == _HANDSHAKE:
            return
        if not first:
            raise PeerLost(f"{self.peer} went away")
        with suppress(OSError):
            socket.socket.recv(self._tls, _GREETING)
            socket.socket.send(self._tls, ENCRYPTED_ONLY)
        raise AuthenticationError(f"{self.peer} came without encryption")

    def receive_into(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """See :meth:`Channel.receive_into`."""
        for buffer in buffers:
            done = 0
            self.bound(0, deadline, "receiving from")
            while done < len(buffer):
                try:
                    count = self._tls.recv_into(buffer[done:])  # at most a record of 16 KiB
                except TimeoutError:
                    raise self._late(deadline, "receiving from") from None
                except (OSError, ValueError) as error:
                    raise self.lost(error if isinstance(error, OSError) else None) from None
                if not count:
                    raise self.lost()
                done += count

    def send(self, buffers: Sequence[memoryview | bytes], deadline: Deadline, more: bool = False) -> None:
        """See :meth:`Channel.send`."""
        for given in buffers:
            buffer, done = memoryview(given), 0
            self.bound(0, deadline, "sending to")
            while done < len(buffer):
                try:
                    done += self._tls.send(buffer[done:])
                except TimeoutError:
                    raise self._late(deadline, "sending to") from None
                except (OSError, ValueError) as error:
                    raise self.lost(error if isinstance(error, OSError) else None) from None

    def _late(self, deadline: Deadline, what: str) -> Exception:
        return self.lost() if self.aborted else DeadlineExceeded(f"{what} {self.peer} took more than {deadline.seconds:g} s")

    def peer_lives(self) -> bool:
        """See :meth:`Channel.peer_lives`."""
        self._tls.settimeout(0.0)
        try:
            return bool(socket.socket.recv(self._tls, 1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def abort(self) -> None:
        """See :meth:`Channel.abort`."""
        self.aborted = True
        with suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)  # TLS's own would turn a read elsewhere into one of plain bytes
