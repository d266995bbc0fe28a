"""Base of all messages, and bounds of their fields, each written once."""

from __future__ import annotations

from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A version number, which published regions store as int64."""
Epoch = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
Step = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None
Few = msgspec.Meta(max_length=64)
Many = msgspec.Meta(max_length=1 << 20)
"""Bound of lists with one item for each rank or tensor. MessagePack sends the count first, so decoding stops before the items."""
Name = Annotated[str, msgspec.Meta(max_length=200)]
Member = Annotated[str, msgspec.Meta(max_length=220)]
"""A name and the number of a rank."""
Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""Text as long as an error message may be (:func:`weightsync.errors.readable`)."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages: immutable, tagged with the class name, strict."""
