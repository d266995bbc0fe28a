"""Hosts of one network, made of network namespaces with names and addresses, and a switch. Needs root and iproute2."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["Hosts", "obstacle"]

_SECONDS = 10.0
_ETC = Path("/etc/netns")  # what `ip netns exec` mounts over /etc


def _ip(*arguments: str) -> None:
    run = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    if run.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {run.stderr.strip()}")


class Hosts:
    """Hosts by name. Every host resolves the names of all; none reaches what is not one of them."""

    interface = "eth0"
    """The interface of each host."""

    def __init__(self, names: Sequence[str]) -> None:
        mark = secrets.token_hex(3)
        subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
        self.addresses = {name: f"{subnet}.{number}" for number, name in enumerate(names, start=1)}
        self._namespaces = {name: f"weightsync-{mark}-{name}" for name in names}
        self._switch = f"weightsync-{mark}"

    @classmethod
    @contextmanager
    def made(cls, *names: str, egress: int | None = None) -> Iterator[Hosts]:
        """Make hosts, which send at most ``egress`` bytes a second each, and remove them at the end.

        Raises:
            OSError: They cannot be made here.
        """
        hosts = cls(names)
        with ExitStack() as owned:
            _ip("netns", "add", hosts._switch)
            owned.callback(_ip, "netns", "del", hosts._switch)
            _ip("-n", hosts._switch, "link", "add", "name", "switch", "type", "bridge")
            _ip("-n", hosts._switch, "link", "set", "switch", "up")
            for number, name in enumerate(names):
                hosts._add(name, f"port{number}", owned)
                if egress is not None:
                    hosts._limit(name, egress)
            yield hosts

    def _add(self, name: str, port: str, owned: ExitStack) -> None:
        namespace, interface = self._namespaces[name], self.interface
        _ip("netns", "add", namespace)
        owned.callback(_ip, "netns", "del", namespace)
        etc = _ETC / namespace
        etc.mkdir(parents=True)
        owned.callback(shutil.rmtree, etc)
        lines = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in self.addresses.items())]
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        _ip("-n", namespace, "link", "add", "name", interface, "type", "veth", "peer", "name", port, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
        _ip("-n", namespace, "addr", "add", f"{self.addresses[name]}/24", "dev", interface)
        for up in ("lo", interface):
            _ip("-n", namespace, "link", "set", up, "up")

    def _limit(self, name: str, egress: int) -> None:
        burst = max(egress // 250, 64 << 10)  # what the clock of a kernel with 250 ticks a second lets through in one
        shape = ["tbf", "rate", f"{egress}bps", "burst", str(burst), "latency", "100ms"]
        subprocess.run(
            ["ip", "netns", "exec", self._namespaces[name], "tc", "qdisc", "add", "dev", self.interface, "root", *shape],
            check=True,
            timeout=_SECONDS,
        )

    def on(self, name: str, *command: str) -> list[str]:
        """Return ``command`` as it runs on host ``name``."""
        return ["ip", "netns", "exec", self._namespaces[name], *command]

    def cut(self, name: str) -> None:
        """Disconnect a host: nothing arrives any more, and no connection is closed."""
        _ip("-n", self._namespaces[name], "link", "set", self.interface, "down")

    def heal(self, name: str) -> None:
        """Connect it again."""
        _ip("-n", self._namespaces[name], "link", "set", self.interface, "up")

    def sent(self) -> Mapping[str, int]:
        """Return the bytes that each host has sent to others."""
        counted = {}
        for name in self._namespaces:
            counter = self.on(name, "cat", f"/sys/class/net/{self.interface}/statistics/tx_bytes")
            counted[name] = int(subprocess.run(counter, capture_output=True, check=True, timeout=_SECONDS).stdout)
        return counted


def obstacle() -> str | None:
    """Return why hosts cannot be made on this machine, or ``None``."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"iproute2 ({', '.join(missing)}) is not installed"
    try:
        with Hosts.made("one", egress=1 << 20):
            return None
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be used here: {error}"
