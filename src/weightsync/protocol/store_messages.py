"""Messages by which trainer ranks and the coordinator store a version together."""

from __future__ import annotations

from typing import Annotated

import msgspec

from weightsync.model.stored import StoredObject
from weightsync.protocol.fields import Epoch, Message, Number, Step

STORE = "store"
"""Scheme of the offers of stored versions, and the name of the store as a source."""


class StoreAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address in the offer of a stored version: as JSON, with the run's public key as the offer's key."""

    url: str
    run: str
    epoch: Epoch
    number: Number
    rank: int


class StorePart(Message, frozen=True):
    """This trainer rank's objects of a published version are in the store.

    Answered when every rank has said so: rank 0 gets :class:`SignedManifest`, the others :class:`Done` once that is in the store.
    """

    epoch: Epoch
    number: Number
    chain: Annotated[tuple[StoredObject, ...], msgspec.Meta(min_length=1, max_length=1024)]
    step: Step = None


class SignedManifest(Message, frozen=True):
    """The manifest of a version, signed with the run's key. Rank 0 creates it in the store."""

    data: bytes
    key: bytes
    """The public half of the key."""


class ManifestStored(Message, frozen=True):
    """The manifest is in the store at ``url``: the version exists there. Answered by :class:`Done`."""

    epoch: Epoch
    number: Number
    url: Annotated[str, msgspec.Meta(max_length=2048)]


class RelayFailing(Message, frozen=True):
    """Why a relay has no newer version to publish; empty if it goes on again. Answered by :class:`Done`."""

    reason: Annotated[str, msgspec.Meta(max_length=4000)]


StoreMessage = StorePart | SignedManifest | ManifestStored | RelayFailing
