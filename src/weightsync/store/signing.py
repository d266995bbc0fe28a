"""The run's Ed25519 key, and manifests that it signed. What a manifest says is believed only with a signature."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass

import msgspec
import numpy as np

from weightsync.arrays import UInt64
from weightsync.config import Secret
from weightsync.errors import HINT, AuthenticationError, ConfigurationError, ProtocolError, WeightSyncError
from weightsync.model import Layout, Manifest, Version, fold
from weightsync.model.stored import STORED_BLOCK, StoredObject, VersionManifest
from weightsync.protocol.messages import UNREADABLE

_MAGIC = b"wsstore1"
_SIGNATURE_BYTES = 64
_KEY_BYTES = 32
_HASH_BYTES = hashlib.sha256().digest_size
_decoder: msgspec.msgpack.Decoder[VersionManifest] = msgspec.msgpack.Decoder(VersionManifest)


def _text(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).decode().rstrip("=")


def _key(text: str, what: str) -> bytes:
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigurationError(f"{what} is 43 characters of base64url")
    return key


def new_secret() -> Secret:
    """Make the private half of a run's key."""
    return Secret(_text(secrets.token_bytes(_KEY_BYTES)))


def public_key(text: str) -> bytes:
    """Decode the public half of a run's key. Raises :class:`~weightsync.errors.ConfigurationError` if it is none."""
    return _key(text, "the public key of a store")


class SigningKey:
    """The private half of a run's key. Shows in no ``repr``.

    Raises:
        ConfigurationError: ``secret`` is not what :func:`new_secret` makes.
    """

    def __init__(self, secret: Secret) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._private = Ed25519PrivateKey.from_private_bytes(_key(secret.reveal(), "the key of a store"))
        self.public = self._private.public_key().public_bytes_raw()
        """The public half, 32 bytes."""
        self.public_text = _text(self.public)

    def signed(self, manifest: VersionManifest) -> bytes:
        """Encode and sign a manifest."""
        body = msgspec.msgpack.encode(manifest)
        return _MAGIC + self._private.sign(_MAGIC + body) + body

    def __repr__(self) -> str:
        return f"<signing key of {self.public_text}>"


@dataclass(frozen=True, eq=False)
class StoredVersion:
    """A version of a store. Its manifest was signed with the run's key, and is consistent."""

    stored: VersionManifest
    manifest: Manifest
    layouts: tuple[Layout, ...]
    """Of each trainer rank's shards."""
    digests: UInt64
    """Of each tensor."""

    @property
    def version(self) -> Version:
        """The version."""
        return self.stored.version

    @property
    def objects(self) -> dict[str, StoredObject]:
        """Every object that it needs, by path."""
        return {item.path: item for rank in self.stored.ranks for item in rank.chain}


def opened(data: bytes | memoryview, public: bytes, run: str, order: tuple[int, int]) -> StoredVersion:
    """Verify and decode a manifest, which must be that of this version: a swapped one is as wrong as a forged one.

    Raises:
        AuthenticationError: It was not signed with the run's key, or is another version's.
        ProtocolError: It contradicts itself.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    name = f"version {order[1]} of epoch {order[0]} of run {run}"
    head, body = len(_MAGIC), bytes(data[len(_MAGIC) + _SIGNATURE_BYTES :])
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(bytes(data[head : head + _SIGNATURE_BYTES]), bytes(data[:head]) + body)
    except (InvalidSignature, ValueError):
        hint = "compare it with what `weightsync store key` prints at home"
        raise AuthenticationError(
            f"the store's manifest of {name} was not signed with this run's key {_text(public)} (--key){HINT}{hint}"
        ) from None
    try:
        stored = _decoder.decode(body)
        if bytes(data[:head]) != _MAGIC or (stored.version.run, stored.version.order) != (run, order):
            raise AuthenticationError(f"the store's manifest of {name} is that of version {stored.version}")
        return _checked(stored)
    except UNREADABLE as error:
        raise ProtocolError(f"the store's manifest of {name} cannot be decoded: {error}") from None
    except AuthenticationError:
        raise
    except WeightSyncError as error:
        raise ProtocolError(f"the store's manifest of {name} contradicts itself: {error}") from None


def _checked(stored: VersionManifest) -> StoredVersion:
    manifest = Manifest(stored.tensors)
    layouts = tuple(Layout.from_columns(manifest, rank.layout) for rank in stored.ranks)
    if len(stored.digests) != 8 * len(manifest):
        raise ProtocolError("it does not have one digest for each tensor")
    digests = np.frombuffer(stored.digests, "<u8").astype(np.uint64)
    if manifest.fingerprint != stored.version.manifest or fold(digests) != stored.version.digest:
        raise ProtocolError("its tensors or digests are not the version's")
    for rank, layout in zip(stored.ranks, layouts, strict=True):
        if len(layout.regions) != 1 or [item.kind for item in rank.chain] != ["key", *["delta"] * (len(rank.chain) - 1)]:
            raise ProtocolError("a rank's chain is not one key frame and deltas")
        for item in rank.chain:
            if len(item.hashes) != _HASH_BYTES * item.chunks or item.data % STORED_BLOCK or item.data > item.nbytes:
                raise ProtocolError(f"{item.path} has the wrong number of hashes, or its data begins nowhere")
        if rank.chain[0].nbytes != rank.chain[0].data + layout.regions[0]:
            raise ProtocolError(f"{rank.chain[0].path} does not have the size of the rank's shards")
    return StoredVersion(stored, manifest, layouts, digests)
