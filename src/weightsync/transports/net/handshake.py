"""Both ends of a data socket prove that they know the run's key before anything else is sent.

::

    reader -> publisher   magic, protocol, reader's nonce (32 bytes)
    publisher  -> reader  magic, protocol, publisher's id (16), publisher's nonce (32), HMAC-SHA256(key, "owner" + both nonces + id)
    reader -> publisher   HMAC-SHA256(key, "reader" + both nonces + id)
    publisher  -> reader  one byte, 1

Everything is of fixed size, so a stranger can make neither end allocate or wait for more than :data:`HELLO_SECONDS`. What follows
is authenticated by the connection only. Inside of TLS (:mod:`weightsync.transports.net.tls`) that is enough; without it the
network between hosts must be trusted not to alter packets (the digests of the round catch what is altered by accident).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, ConfigurationError, PeerLost, ProtocolError
from weightsync.transports.net.channel import Channel

HELLO_SECONDS = 5.0
"""How long a connection may take to prove itself."""
ID_BYTES = 16
_MAGIC = b"wsync\x00\x00\x03"  # the last two bytes are the protocol's number
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_SHORTEST_KEY = 16
_WELCOME = b"\x01"
_ENCRYPTED_ONLY = b"\xff\xff"  # in the place of the protocol's number

ENCRYPTED_ONLY = (_MAGIC[:6] + _ENCRYPTED_ONLY).ljust(len(_MAGIC) + ID_BYTES + _NONCE_BYTES + _PROOF_BYTES, b"\0")
"""What a publisher that encrypts answers, in plain text, to a reader that does not."""


def check_key(key: bytes) -> bytes:
    """``key``, or :class:`~weightsync.errors.ConfigurationError` if it is too short to keep anybody out."""
    if len(key) < _SHORTEST_KEY:
        raise ConfigurationError(f"a run key has at least {_SHORTEST_KEY} bytes, this one has {len(key)}")
    return key


def _proof(key: bytes, role: bytes, reader_nonce: bytes, publisher_nonce: bytes, publisher_id: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + reader_nonce + publisher_nonce + publisher_id, hashlib.sha256)


def _check_magic(data: bytes, peer: str) -> None:
    if data[:6] != _MAGIC[:6]:
        raise ProtocolError(f"{peer} does not speak weightsync")
    if data[6:8] == _ENCRYPTED_ONLY:
        raise AuthenticationError(f"{peer} takes encrypted connections only, and its address did not say so: it was changed")
    if data[:8] != _MAGIC:
        theirs, ours = int.from_bytes(data[6:8], "big"), int.from_bytes(_MAGIC[6:8], "big")
        raise ProtocolError(f"{peer} speaks transport protocol {theirs}, this is {ours}: install the same weightsync on both sides")


def greet_publisher(channel: Channel, key: bytes, publisher_id: bytes, deadline: Deadline) -> None:
    """The reader's half. Raises :class:`~weightsync.errors.AuthenticationError` unless the publisher knows ``key``."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send([_MAGIC + nonce], deadline)
    answer = bytes(channel.receive(len(_MAGIC) + ID_BYTES + _NONCE_BYTES + _PROOF_BYTES, deadline))
    _check_magic(answer, channel.peer)
    their_id, rest = answer[len(_MAGIC) : len(_MAGIC) + ID_BYTES], answer[len(_MAGIC) + ID_BYTES :]
    their_nonce, proof = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
    if their_id != publisher_id:
        raise PeerLost(f"another publisher answers as {channel.peer} now: the source was restarted")
    if not hmac.compare_digest(proof, _proof(key, b"owner", nonce, their_nonce, publisher_id)):
        raise AuthenticationError(f"{channel.peer} does not have this run's key")
    channel.send([_proof(key, b"reader", nonce, their_nonce, publisher_id)], deadline)
    if bytes(channel.receive(1, deadline)) != _WELCOME:
        raise ProtocolError(f"{channel.peer} sent an unexpected message instead of a welcome")


def greet_reader(channel: Channel, key: bytes, publisher_id: bytes, deadline: Deadline) -> None:
    """The publisher's half. Raises :class:`~weightsync.errors.AuthenticationError` unless the reader knows ``key``."""
    hello = bytes(channel.receive(len(_MAGIC) + _NONCE_BYTES, deadline))
    _check_magic(hello, channel.peer)
    their_nonce = hello[len(_MAGIC) :]
    nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send([_MAGIC + publisher_id + nonce + _proof(key, b"owner", their_nonce, nonce, publisher_id)], deadline)
    proof = bytes(channel.receive(_PROOF_BYTES, deadline))
    if not hmac.compare_digest(proof, _proof(key, b"reader", their_nonce, nonce, publisher_id)):
        raise AuthenticationError(f"{channel.peer} does not have this run's key")
    channel.send([_WELCOME], deadline)
