"""What each process of the transports' tests does first, because libraries keep what they make then until the process ends.

A module of its own, since a publisher's process would take longer to import a file of tests than to serve.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["make_an_agent", "open_a_store"]


def open_a_store() -> None:
    """The library under torch's stores keeps a pipe."""
    store: Any = dist
    store.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def make_an_agent() -> None:
    """The libraries under NIXL keep what they make with the first agent."""
    from weightsync_nixl.agent import Agent

    Agent({}).close()
