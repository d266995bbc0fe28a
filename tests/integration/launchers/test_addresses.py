"""Holds where a trainer rank serves its shards over TCP: loopback, the interface that leads to the coordinator, or as told.

As told is an address, a name, or the name of a network interface, which may be the same on all hosts of a cluster.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

import weightsync
from weightsync.config import Secret, ServerSettings
from weightsync.server.server import BackgroundServer
from weightsync.transports import hostinfo as host

STATE = {"a": torch.arange(12, dtype=torch.float32).reshape(3, 4)}
TOKEN = "0123456789abcdefghijklmnopqrstuv"


def own_address() -> str | None:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation range: nothing is sent
        except OSError:
            return None
        found = str(probe.getsockname()[0])
    return None if ipaddress.ip_address(found).is_loopback else found


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.fixture(params=["127.0.0.1", "::1", "own"])
def server(request: pytest.FixtureRequest) -> Iterator[BackgroundServer]:
    host = request.param
    if host == "own":
        host = own_address()
        if host is None:
            pytest.skip("this machine has no address but loopback")
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with BackgroundServer(ServerSettings.load({}, host=host, port=0, token=Secret(TOKEN))) as made:
        yield made


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3, 4))


def test_shards_are_served_where_the_coordinator_is_reached(no_leaks: None, server: BackgroundServer) -> None:
    module = Model()
    with (
        weightsync.Trainer(STATE, server.url, token=TOKEN, rank=0, world_size=1, transports=["tcp"]) as trainer,
        weightsync.Engine(weightsync.ModuleAdapter(module), "r", server.url, token=TOKEN, transports=["tcp"]),
    ):
        host = trainer._role.offers[0].address.rpartition(":")[0].strip("[]")
        if ipaddress.ip_address(server.address.host).is_loopback:
            assert host == "127.0.0.1"
        else:
            assert host == server.address.host
        assert trainer.publish(1, timeout=20).ok
    assert torch.equal(module.a, STATE["a"])


def loopback() -> str:
    """The name of the loopback interface."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "interface"])
def test_the_address_can_be_chosen(no_leaks: None, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    chosen, host = (loopback(), "127.0.0.1") if host == "interface" else (host, host)
    monkeypatch.setenv("WEIGHTSYNC_DATA_HOST", chosen)
    module = Model()
    with (
        BackgroundServer(ServerSettings.load({}, port=0, token=Secret(TOKEN))) as server,
        weightsync.Trainer(STATE, server.url, token=TOKEN, rank=0, world_size=1, transports=["tcp"]) as trainer,
        weightsync.Engine(weightsync.ModuleAdapter(module), "r", server.url, token=TOKEN, transports=["tcp"]),
    ):
        shown = f"[{host}]" if ":" in host else host
        assert trainer._role.offers[0].address.startswith(f"{shown}:")
        assert trainer.publish(1, timeout=20).ok
    assert torch.equal(module.a, STATE["a"])


def test_an_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_DATA_HOST", "192.0.2.7")
    with (
        BackgroundServer(ServerSettings.load({}, port=0, token=Secret(TOKEN))) as server,
        pytest.raises(weightsync.ConfigurationError, match=r"192\.0\.2\.7"),
    ):
        weightsync.Trainer(STATE, server.url, token=TOKEN, rank=0, world_size=1, transports=["tcp"])


def test_every_interface_is_known_by_its_name() -> None:
    if (own := own_address()) is None:
        pytest.skip("this machine has no address but loopback")
    found = []
    for _, name in socket.if_nameindex():
        with suppress(weightsync.TransportUnavailable):
            found.append(host.own_address(name))
    assert {"127.0.0.1", own} <= set(found)
    assert host.own_address("head.example") == "head.example"


@pytest.mark.parametrize(
    ("table", "address"),
    [
        # as in /proc/net/if_inet6: a link-local address, a global one, one of another interface
        (
            "fe8000000000000000fc00fffe000001 04 40 20 80 ghost0\n"
            "20010db8000000000000000000000002 04 40 00 82 ghost0\n"
            "20010db8000000000000000000000003 05 40 00 82 ghost1",
            "2001:db8::2",
        ),
        ("fe8000000000000000fc00fffe000001 04 40 20 80 ghost0\n20010db8000000000000000000000003 05 40 00 82 ghost1", None),
        ("", None),
    ],
)
def test_an_interface_without_ipv4_has_its_ipv6_address(monkeypatch: pytest.MonkeyPatch, table: str, address: str | None) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (4, "ghost0"), (5, "ghost1")])
    monkeypatch.setattr(host, "text_of", lambda path: table if path == "/proc/net/if_inet6" else "")
    if address is None:
        with pytest.raises(weightsync.TransportUnavailable, match="ghost0 has no address"):
            host.own_address("ghost0")
    else:
        assert host.own_address("ghost0") == address
