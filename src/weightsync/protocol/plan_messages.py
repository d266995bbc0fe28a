"""What a plan tells an engine rank: from whom it reads, by which transports, and which pieces go where."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightsync.model.layout import LayoutColumns
from weightsync.protocol.fields import Few, Many, Member, Name, Text


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location of a rank. Ranks with equal ``memory`` can share memory; ranks with equal ``name`` run on the same machine."""

    name: Name
    memory: Name


Memory = Literal["host", "cuda"]
Reach = Literal["process", "host", "network"]


class Traits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Capabilities of a transport. Every offer carries them, so that no decision depends on a transport's name.

    Attributes:
        reads: Memories of a publisher from which readers can read.
        writes: Memories into which a reader can write.
        reach: Largest distance between a publisher and its readers: one process, one host, or any network.
        encrypted: Whether bytes on the network are encrypted. If that depends on settings, a transport says that it can, and its
            offer whether it does.
        digests: Whether a reader computes digests while it writes ("inline"), or the caller does it in a later pass ("after").
        live_source: Whether readers read the publisher's own memory, which must then stay alive and unchanged meanwhile.
        shared_fate: Whether a reader that stops delays the others. Such a transport is used only if it is named explicitly.
    """

    reads: Annotated[tuple[Memory, ...], Few] = ("host",)
    writes: Annotated[tuple[Memory, ...], Few] = ("host",)
    reach: Reach = "network"
    encrypted: bool = False
    digests: Literal["inline", "after"] = "inline"
    live_source: bool = False
    shared_fate: bool = False


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to reach a trainer rank's shards: a transport's name and its address, which only that transport understands."""

    scheme: Name
    address: Text
    host: Host
    traits: Traits = Traits()


class SourceAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank from which a plan reads: its name, the layout for which the plan was made, and its offers, best first."""

    member: Member
    layout_digest: Name
    offers: Annotated[tuple[Offer, ...], Few]
    key: bytes = b""
    """Secret that authorizes a reader. It never appears in logs, status or ``repr``."""

    def __repr__(self) -> str:
        return f"<SourceAddress of {self.member}>"


class PieceColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pieces that one target rank receives, as little-endian columns, see :class:`weightsync.planning.pieces.Pieces`."""

    rows: int
    dims: int
    source: bytes
    source_region: bytes
    source_offset: bytes
    source_strides: bytes
    target_row: bytes
    starts: bytes
    stops: bytes


class PlanSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a plan for one engine rank: its pieces, their sources, and the layout that they fill.

    For direct delivery ``layout`` is the engine's own. For streamed delivery it describes staging memory: region ``k`` is bucket
    ``k``, and each row is a whole tensor.
    """

    digest: Name
    delivery: Literal["direct", "streamed"]
    reason: Text
    """Why this delivery was chosen, for display."""
    sources: Annotated[tuple[SourceAddress, ...], Many]
    layout: LayoutColumns
    pieces: PieceColumns
    nbytes: int
