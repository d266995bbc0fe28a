"""Messages of ``nixl`` beside the common ones."""

from __future__ import annotations

import msgspec

from weightsync.protocol.messages import Memory
from weightsync.transports.net.messages import ControlMessage, Fail, Messages, Ready, RegisterTiles, Start


class DescribeMemory(ControlMessage, frozen=True):
    """Of ``nixl``: asks where the publisher's memory is; answered by :class:`MemoryDescription` or :class:`Fail`."""


class MemoryDescription(ControlMessage, frozen=True):
    """Where a publisher's memory is, and what a NIXL agent needs to read it.

    Attributes:
        agent: Metadata of the publisher's agent.
        memory: Memory of the regions; the header page is always in host memory.
        device: CUDA device of the regions.
        exports: How often the publisher has exported its memory.
        layout_digest: Layout of the regions.
        header: Address of the header page.
        regions: Address and bytes of each region, little-endian ``int64[regions, 2]``.
        buffer_bytes: Most bytes of a frame.
        buffers: Address of each of this reader's staging buffers, if it registered tiles.
    """

    agent: bytes
    memory: Memory
    device: int
    exports: int
    layout_digest: str
    header: int
    regions: bytes
    buffer_bytes: int
    buffers: tuple[int, ...]


class Pack(ControlMessage, frozen=True):
    """Of ``nixl``: pack this frame of the registered tiles into its staging buffer; answered by :class:`Ready` or :class:`Fail`."""

    frame: int


MESSAGES: Messages = msgspec.msgpack.Decoder(RegisterTiles | Start | Ready | Fail | DescribeMemory | MemoryDescription | Pack)
