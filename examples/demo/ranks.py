"""How the ranks of a trainer on one machine find each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

__all__ = ["join"]


def join(rank: int, world_size: int, port: int, listen_fd: int | None, seconds: float) -> None:
    """Make torch's default process group over loopback. ``listen_fd`` is rank 0's socket for the rendezvous, bound to ``port``.

    Ranks wait ``seconds`` seconds for each other.
    """
    import torch.distributed as dist

    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback  # else gloo asks the resolver for this machine's name
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listen_fd
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
