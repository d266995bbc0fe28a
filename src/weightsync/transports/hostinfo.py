"""Where this process runs, in the two ways that matter to transports."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import secrets
import socket
import struct
import uuid
from pathlib import Path

from weightsync.errors import TransportUnavailable
from weightsync.protocol.messages import Host

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
_LINK_SCOPE = "20"  # of an IPv6 address in /proc/net/if_inet6


_process = secrets.token_hex(16)


def this_process() -> str:
    """Return a name that no other process has. The number tells a forked child, which inherits the rest."""
    return f"{_process}-{os.getpid()}"


def text_of(path: str) -> str:
    """Return what a file says, such as one of ``/proc``; nothing if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _short(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def this_host() -> Host:
    """The :class:`~weightsync.protocol.messages.Host` of this process.

    ``name`` is the host name with a mark of the running kernel (boot id, else the network card's number) and of the network
    namespace: loopback addresses of equal names are the same. ``memory`` adds the user: abstract sockets and the check of the
    peer's user need both, so two containers or users that cannot share memory never have equal ones.
    """
    machine = text_of("/proc/sys/kernel/random/boot_id") or f"{platform.node()}-{uuid.getnode():x}"
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


def own_address(name: str) -> str:
    """The address of this machine's network interface ``name`` (IPv4, else IPv6 that leaves the link); any other name as it is.

    Raises :class:`~weightsync.errors.TransportUnavailable` for an interface without an address.
    """
    if name not in (known for _, known in socket.if_nameindex()):
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("16s240x", name.encode()))
        except OSError:  # no IPv4 address
            answer = b""
    if answer:
        return socket.inet_ntoa(answer[20:24])
    for line in text_of("/proc/net/if_inet6").splitlines():  # address, index, prefix length, scope, flags, name
        fields = line.split()
        if fields[5] == name and fields[3] != _LINK_SCOPE:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
    raise TransportUnavailable(f"the network interface {name} has no address")
