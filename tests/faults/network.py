"""A network of its own for one engine rank, which can be cut, healed, slowed and made to lose packets. Needs root and iproute2."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from weightsync.errors import ConfigurationError

__all__ = ["Network", "enter", "obstacle"]

_SECONDS = 10.0
_CLONE_NEWNET = 0x40000000


def _ip(*arguments: str) -> None:
    run = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    if run.returncode:
        raise ConfigurationError(f"ip {' '.join(arguments)}: {run.stderr.strip()}")


class Network:
    """Two ends of a cable: ours at :attr:`host`, theirs in the namespace :attr:`namespace`."""

    def __init__(self) -> None:
        mark = secrets.token_hex(3)
        self.namespace, self._ours, self._theirs = f"weightsync-{mark}", f"wso{mark}", f"wst{mark}"
        self._subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
        self.host = f"{self._subnet}.1"
        """The address of our end, which both sides reach."""

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[Network]:
        """Laid, and taken away at the end. Raises :class:`~weightsync.errors.ConfigurationError` where it may not be made."""
        network = cls()
        try:
            _ip("netns", "add", network.namespace)
            _ip("link", "add", network._ours, "type", "veth", "peer", "name", network._theirs, "netns", network.namespace)
            _ip("addr", "add", f"{network.host}/24", "dev", network._ours)
            _ip("link", "set", network._ours, "up")
            _ip("-n", network.namespace, "addr", "add", f"{network._subnet}.2/24", "dev", network._theirs)
            _ip("-n", network.namespace, "link", "set", network._theirs, "up")
            _ip("-n", network.namespace, "link", "set", "lo", "up")
            yield network
        finally:
            for what in (("link", "del", network._ours), ("netns", "del", network.namespace)):
                with suppress(ConfigurationError):  # it was never made
                    _ip(*what)

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", self._theirs, "down")

    def heal(self) -> None:
        """The cable is whole, and neither slow nor lossy."""
        _ip("-n", self.namespace, "link", "set", self._theirs, "up")
        with suppress(ConfigurationError, OSError):
            self._shape("del")

    def impair(self, how: str) -> None:
        """``delay`` packets by 20 ms, or lose one in twenty (``loss``). Raises :class:`~weightsync.errors.ConfigurationError`."""
        self._shape("replace", *{"delay": ("delay", "20ms", "5ms"), "loss": ("loss", "5%")}[how])

    def _shape(self, verb: str, *what: str) -> None:
        command = ["tc", "qdisc", verb, "dev", self._ours, "root", "netem", *what]
        run = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if run.returncode:
            raise ConfigurationError(f"this kernel cannot make a network slow or lossy: {run.stderr.strip()}")


def obstacle(how: str) -> str | None:
    """Why ``how`` (``cut``, ``delay``, ``loss``) cannot be done to a network on this machine; ``None`` if it can."""
    if shutil.which("ip") is None or (how != "cut" and shutil.which("tc") is None):
        return "iproute2 (ip, tc) is not installed"
    try:
        with Network.made() as network:
            if how != "cut":
                network.impair(how)
    except (ConfigurationError, OSError) as error:
        return f"network namespaces cannot be used here: {error}"
    return None


def enter(namespace: str) -> None:
    """Put this thread, and those that it starts, into the network ``namespace``."""
    library = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if library.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)
