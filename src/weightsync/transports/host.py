"""Where this process runs, in the two ways that matter to transports."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import uuid
from pathlib import Path

from weightsync.errors import TransportUnavailable
from weightsync.messages import Host

__all__ = ["reachable_address", "this_host"]


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _short(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def this_host() -> Host:
    """The :class:`~weightsync.messages.Host` of this process.

    ``name`` is the host name with a mark of the running kernel (boot id, else the network card's number) and of the network
    namespace: loopback addresses of equal names are the same. ``memory`` adds the user: abstract sockets and the check of the
    peer's user need both, so two containers or users that cannot share memory never have equal ones.
    """
    machine = _text("/proc/sys/kernel/random/boot_id") or f"{platform.node()}-{uuid.getnode():x}"
    network = _link("/proc/self/ns/net")
    user = f"{os.getuid()}-{_link('/proc/self/ns/user')}" if hasattr(os, "getuid") else "single"
    return Host(name=f"{socket.gethostname()}-{_short(machine, network)}", memory=_short(machine, network, user))


def reachable_address(host: str, port: int) -> str:
    """This machine's address as ``host`` would see it: that of the interface which leads there. Sends nothing."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportUnavailable(f"no way to {host}: {error}") from error
