"""What a rank of a test says of itself."""

from __future__ import annotations

from typing import Any

from weightsync.protocol.messages import PROTOCOL, Hello, Host

__all__ = ["said"]


def said(name: str, rank: int, world_size: int, host: Host, **more: Any) -> Hello:
    """The Hello of rank ``rank`` of the trainer or of replica ``name``, without its manifest and layout."""
    given: dict[str, Any] = {"session": "s", "pid": 0, "manifest": (), "bucket_bytes": 256 << 20, "adapter": "custom", **more}
    given["role"] = "trainer" if name == "trainer" else "engine"
    return Hello(protocol=PROTOCOL, run="run", name=name, rank=rank, world_size=world_size, host=host, **given)
