"""Transport ``tcp``: the owner sends what the reader asked for over one connection. IPv4 and IPv6.

Both ends prove themselves (:mod:`weightsync.transports.net.handshake`). Beyond loopback the connection is encrypted
(:mod:`weightsync.transports.net.tls`), unless the publisher's settings say that the network is trusted.
"""

from __future__ import annotations

import functools
import ipaddress
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, PeerLost, ProtocolError
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.protocol.tokens import is_loopback
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.connected_reader import Dial
from weightsync.transports.net.handshake import ID_BYTES, check_key, greet_owner
from weightsync.transports.net.listener import Listener
from weightsync.transports.net.requests import TableBudget
from weightsync.transports.net.tls import FINGERPRINT_BYTES, EncryptedChannel, owner_context, reader_context
from weightsync.transports.tcp.receiver import StreamReader
from weightsync.transports.tcp.sender import Sender

__all__ = ["ListeningPublisher", "Tcp", "TcpPublisher", "dialer", "parse_address", "reaches", "tune"]

_Address = tuple[int, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]  # a family, and what connect() takes
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a host that vanished is noticed within a minute


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice a host that vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def parse_address(address: str) -> tuple[str, int, bytes]:
    """Host, port and id of an owner, from its offer. Raises :class:`~weightsync.errors.ProtocolError`."""
    parsed = _Where.parse(address)
    return parsed.host, parsed.port, parsed.owner_id


class _Where(NamedTuple):
    """An address, ``host:port/id``, or ``host:port/id/fingerprint`` of an owner that speaks TLS only."""

    host: str
    port: int
    owner_id: bytes
    fingerprint: bytes

    @classmethod
    def parse(cls, address: str) -> _Where:
        where, _, rest = address.partition("/")
        owner_id, secured, fingerprint = rest.partition("/")
        host, _, port = where.rpartition(":")
        try:
            parsed = cls(host.removeprefix("[").removesuffix("]"), int(port), bytes.fromhex(owner_id), bytes.fromhex(fingerprint))
        except ValueError:
            parsed = cls("", 0, b"", b"")
        lengths = ID_BYTES, FINGERPRINT_BYTES if secured else 0
        if not parsed.host or not 0 < parsed.port < 1 << 16 or (len(parsed.owner_id), len(parsed.fingerprint)) != lengths:
            raise ProtocolError(f"{address!r} is not the address of a tcp owner (host:port/id, or host:port/id/fingerprint)")
        return parsed


def reaches(offer: Offer, local_host: Host) -> bool:
    """Return whether ``local_host`` could connect to the address of ``offer``: a loopback address only reaches its own host."""
    try:
        host = _Where.parse(offer.address).host
    except ProtocolError:
        return False
    return offer.host.name == local_host.name or not is_loopback(host)


class ListeningPublisher(ABC):
    """Listens on one address for ``transport``, and serves each authenticated reader in a thread."""

    def __init__(
        self,
        transport: Transport,
        key: bytes,
        local_host: Host,
        bind: str,
        port: int,
        advertise: str | None,
        encrypt: bool | None = False,  # None: beyond loopback
    ) -> None:
        owner_id = secrets.token_bytes(ID_BYTES)
        try:
            family, kind, _, _, where = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except socket.gaierror as error:
            raise ConfigurationError(f"tcp transport: {bind!r} is not an address of this host: {error}") from error
        sock = socket.socket(family, kind)
        try:
            if port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(where)
            except OSError as error:
                raise ConfigurationError(f"tcp transport: cannot listen on {bind} port {port}: {error.strerror}") from error
            bound, actual = sock.getsockname()[:2]
            self.bound: str = bound
            """The address that it listens on."""
            shown = advertise or bound
            if not advertise and ipaddress.ip_address(bound.partition("%")[0]).is_unspecified:
                raise ConfigurationError(
                    f"tcp transport: bound to every address ({bind}); say which one readers use: advertise=..."
                )
            host = f"[{shown}]" if ":" in shown else shown
            address = f"{host}:{actual}/{owner_id.hex()}"
            make: Callable[[socket.socket, str], Channel] = Channel
            encrypted = encrypt or (encrypt is None and not is_loopback(bound))
            if encrypted:
                context, fingerprint = owner_context()
                address += f"/{fingerprint.hex()}"
                make = functools.partial(EncryptedChannel, context=context)
            traits = msgspec.structs.replace(transport.traits, encrypted=encrypted)
            self._offer = Offer(scheme=transport.name, address=address, host=local_host, traits=traits)
            self._listener = Listener(sock, transport.name, check_key(key), owner_id, self._serve, channel=make)
        except BaseException:
            sock.close()
            raise

    @property
    def offer(self) -> Offer:
        """See :class:`weightsync.transports.base.Publisher`."""
        return self._offer

    def busy(self) -> AbstractContextManager[None]:
        """Give a context for a transfer: see :meth:`Listener.busy`."""
        return self._listener.busy()

    @abstractmethod
    def _serve(self, channel: Channel) -> None:
        """Answer one reader, until it goes away."""

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        self._listener.close()


class TcpPublisher(ListeningPublisher):
    """Sends each reader what it asks for."""

    def __init__(
        self,
        transport: Transport,
        region: PublishedRegion,
        key: bytes,
        local_host: Host,
        bind: str,
        port: int,
        advertise: str | None,
        encrypt: bool | None = False,
    ) -> None:
        self._region, self._budget = region, TableBudget(region.nbytes)
        super().__init__(transport, key, local_host, bind, port, advertise, encrypt)

    def _serve(self, channel: Channel) -> None:
        tune(channel.socket)
        Sender(self._region, channel, self._budget, self.busy).run()


class Tcp(Transport):
    """The transport ``tcp``.

    ``bind`` is the address to listen on, ``port`` 0 for any, ``advertise`` the address that readers get instead.

    Without ``bind`` it listens where the trainer's :class:`~weightsync.transports.base.Network` says, or on loopback. Without
    ``encrypt`` it does as the network says, or encrypts beyond loopback. Readers do as the publisher's address says.
    """

    name = "tcp"
    traits = Traits(encrypted=True)

    def __init__(self, bind: str | None = None, port: int = 0, advertise: str | None = None, encrypt: bool | None = None) -> None:
        self._bind, self._port, self._advertise, self._encrypt = bind, port, advertise, encrypt

    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """See :class:`weightsync.transports.base.Transport`."""
        return reaches(offer, local_host)

    def publish(self, region: PublishedRegion, key: bytes, local_host: Host, network: Network = LOOPBACK) -> ListeningPublisher:
        """See :class:`weightsync.transports.base.Transport`."""
        encrypt = network.encrypt if self._encrypt is None else self._encrypt
        bind = self._bind or network.address
        return TcpPublisher(self, region, key, local_host, bind, self._port, self._advertise, encrypt)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> StreamReader:
        """See :class:`weightsync.transports.base.Transport`."""
        host, port, owner_id, fingerprint = _Where.parse(offer.address)
        if offer.traits.encrypted and not fingerprint:
            raise ProtocolError(f"{offer.address!r} names no certificate, and the offer says that it is encrypted")
        make: Callable[[socket.socket, str], Channel] = Channel
        if fingerprint:
            make = functools.partial(EncryptedChannel, context=reader_context(), fingerprint=fingerprint)

        return StreamReader(dialer(host, port, owner_id, key, make), deadline)


def _look_up(host: str, port: int, deadline: Deadline) -> list[_Address]:
    """Addresses of ``host``. The C library keeps no time in this, so a thread waits for it, and is left alone if it is late."""
    addresses: Future[list[_Address]] = Future()

    def look() -> None:
        try:
            addresses.set_result([(info[0], info[4]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except (OSError, UnicodeError) as error:
            addresses.set_exception(error)

    what = f"looking up the source's host {host}"
    thread = threading.Thread(target=look, name="weightsync-tcp-look-up", daemon=True)
    thread.start()
    thread.join(deadline.remaining(what))
    if not addresses.done():
        deadline.remaining(what)
        raise DeadlineExceeded(f"{what} did not finish within {deadline.seconds:g} s")
    try:
        return addresses.result(0)
    except (OSError, UnicodeError) as error:
        raise PeerLost(f"the source's host {host} cannot be found: {error}") from error


def dialer(host: str, port: int, owner_id: bytes, key: bytes, make: Callable[[socket.socket, str], Channel] = Channel) -> Dial:
    """Return the function by which a reader connects to the owner ``owner_id``, and again after a failure."""

    def dial(adopt: Callable[[Channel], None], deadline: Deadline) -> Channel:
        channel = _open_channel(host, port, adopt, deadline, make)
        channel.secure(deadline)
        greet_owner(channel, key, owner_id, deadline)
        return channel

    return dial


def _open_channel(
    host: str,
    port: int,
    adopt: Callable[[Channel], None],
    deadline: Deadline,
    make: Callable[[socket.socket, str], Channel],
) -> Channel:
    """Return a connection to an owner, given to ``adopt`` before it is made."""
    reasons = []
    for family, where in _look_up(host, port, deadline):
        with ExitStack() as owned:
            sock = owned.enter_context(socket.socket(family, socket.SOCK_STREAM))
            channel = make(sock, f"the source at {host} port {port}")
            owned.callback(channel.close)
            try:
                adopt(channel)
                tune(channel.socket)
                channel.socket.settimeout(deadline.remaining(f"connecting to {channel.peer}"))
                channel.socket.connect(where)
                channel.socket.settimeout(None)
            except TimeoutError:
                raise DeadlineExceeded(f"{channel.peer} did not accept a connection within {deadline.seconds:g} s") from None
            except OSError as error:
                if channel.aborted:
                    raise Aborted(f"connecting to {channel.peer} was aborted") from None
                reasons.append(str(error))
                continue
            owned.pop_all()
            return channel
    raise PeerLost(f"no publisher answers at {host} port {port}: {'; '.join(reasons)}")
