"""Encrypted data sockets: who is believed, what a neighbour on the path sees and can do, and which ways lead back to plain text."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

import weightsync
from weightsync.config import ServerSettings
from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, ConfigurationError, PeerLost, ProtocolError, WeightSyncError
from weightsync.protocol.messages import Offer
from weightsync.publishing.publication import ReaderAccess
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.base import Network
from weightsync.transports.broadcast.collective import Collective
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync.transports.net import compression, encrypted_records
from weightsync.transports.net.listening_publisher import ListeningPublisher
from weightsync.transports.net.tls import publisher_context
from weightsync.transports.tcp.transport import Tcp
from weightsync_testing.copy_cases import Wanted, big

pytestmark = pytest.mark.usefixtures("no_leaks")

KEY = secrets.token_bytes(32)
NBYTES = 3 << 20
SECRET = b"the trainer's weights in the clear"


@pytest.fixture
def region() -> Iterator[PublishedRegion]:
    made = PublishedRegion(NBYTES, "layout")
    with made.placing(1):
        made.payload[:] = np.resize(np.frombuffer(SECRET, np.uint8), NBYTES)
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["encrypted", "plain"])
def owner(request: pytest.FixtureRequest, region: PublishedRegion) -> Iterator[ListeningPublisher]:
    owner = Tcp(encrypt=request.param).publish(region, KEY, this_host())
    yield owner
    owner.close()


encrypted = pytest.mark.parametrize("owner", [True], indirect=True)
plain = pytest.mark.parametrize("owner", [False], indirect=True)


def parts(offer: Offer) -> tuple[int, str, str]:
    """Port, owner's id, fingerprint of the certificate (empty if there is none)."""
    found = re.fullmatch(r"127\.0\.0\.1:(\d+)/([0-9a-f]{32})(?:/([0-9a-f]{64}))?", offer.address)
    assert found is not None
    return int(found[1]), found[2], found[3] or ""


def elsewhere(offer: Offer, *, port: int | None = None, fingerprint: str | None = None) -> Offer:
    """The offer with another port or fingerprint; an empty one says that the owner does not encrypt."""
    old_port, owner_id, old = parts(offer)
    last = old if fingerprint is None else fingerprint
    return Offer("tcp", f"127.0.0.1:{port or old_port}/{owner_id}" + (f"/{last}" if last else ""), offer.host)


def transfer(offer: Offer, key: bytes = KEY) -> Wanted:
    wanted = big(NBYTES, groups=2)
    source = Tcp().open(offer, key, Deadline(10))
    try:
        source.prepare(wanted.groups, "layout", Deadline(10))
        source.begin(1, Deadline(10))
        for group in range(2):
            source.read(group, Deadline(10))
        source.end(Deadline(10))
    finally:
        source.close()
    return wanted


@encrypted
def test_compressed_records_bring_the_same_bytes(owner: ListeningPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[int] = []

    def counted(content: memoryview, into: memoryview) -> None:
        compression.unpacked(content, into)
        unpacked.append(len(into))

    monkeypatch.setattr(encrypted_records, "unpacked", counted)
    monkeypatch.setattr(compression.Compression, "active", property(lambda _: True, lambda _, value: None), raising=False)
    compressed = transfer(owner.offer).target
    monkeypatch.undo()
    assert np.array_equal(compressed, transfer(owner.offer).target)
    assert bytes(compressed).count(SECRET) > 1000
    assert sum(unpacked) > NBYTES / 2


class Neighbour:
    """Sits on the path, passes everything on, keeps what it saw, and flips a bit of what the owner says from byte ``flip`` on."""

    def __init__(self, port: int, flip: int | None = None) -> None:
        self.saw = bytearray()
        self._owner = ("127.0.0.1", port)
        self._flip = flip
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            reader, _ = self._listener.accept()
            owner = socket.create_connection(self._owner, timeout=10)
            self._open += [reader, owner]
            for one, other in ((reader, owner), (owner, reader)):
                self._threads.append(threading.Thread(target=self._pass, args=(one, other, one is owner)))
                self._threads[-1].start()

    def _pass(self, one: socket.socket, other: socket.socket, from_owner: bool) -> None:
        count = 0
        with contextlib.suppress(OSError):
            while data := bytearray(one.recv(1 << 16)):
                if from_owner:
                    self.saw += data
                    if self._flip is not None and count <= self._flip < count + len(data):
                        data[self._flip - count] ^= 1
                    count += len(data)
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
        for sock in (self._listener, *self._open):
            sock.close()


def test_a_neighbour_reads_weights_only_where_nothing_is_encrypted(owner: ListeningPublisher) -> None:
    with contextlib.closing(Neighbour(parts(owner.offer)[0])) as neighbour:
        wanted = transfer(elsewhere(owner.offer, port=neighbour.port))
    assert bytes(wanted.target).count(SECRET) > 1000
    assert len(neighbour.saw) > NBYTES // 2
    assert (SECRET in neighbour.saw) == (not parts(owner.offer)[2])


@encrypted
@pytest.mark.parametrize("where", [200, 1000, 1 << 20])
def test_a_bit_that_was_changed_on_the_way_ends_the_connection(owner: ListeningPublisher, where: int) -> None:
    """In the handshake, after it, and among the weights."""
    with contextlib.closing(Neighbour(parts(owner.offer)[0], flip=where)) as neighbour, pytest.raises(WeightSyncError) as raised:
        transfer(elsewhere(owner.offer, port=neighbour.port))
    assert isinstance(raised.value, PeerLost | AuthenticationError | ProtocolError)


@encrypted
def test_another_certificate_is_not_believed_and_hears_nothing(owner: ListeningPublisher) -> None:
    """Of whoever answers in the owner's place, with TLS of their own."""
    context, _ = publisher_context()
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            sock, _ = listener.accept()
            sock.settimeout(10)
            with sock, contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as tls:
                heard.append(tls.recv(100))

        pretender = threading.Thread(target=pretend)
        pretender.start()
        with pytest.raises(AuthenticationError, match="another certificate"):
            transfer(elsewhere(owner.offer, port=listener.getsockname()[1]))
        pretender.join(10)
    assert heard in ([], [b""])


@encrypted
def test_the_certificate_alone_opens_nothing(owner: ListeningPublisher) -> None:
    with pytest.raises((AuthenticationError, PeerLost)):
        transfer(owner.offer, b"another key than the one of the run")


@encrypted
def test_an_address_without_its_fingerprint_leads_to_a_clear_refusal(owner: ListeningPublisher) -> None:
    """A downgrade: somebody has cut it off, or gave an old address."""
    with pytest.raises(AuthenticationError, match="takes encrypted connections only"):
        transfer(elsewhere(owner.offer, fingerprint=""))
    assert bytes(transfer(owner.offer).target).count(SECRET) > 1000


@plain
def test_an_owner_that_does_not_encrypt_though_its_address_says_so(owner: ListeningPublisher) -> None:
    with pytest.raises((AuthenticationError, PeerLost), match=r"does not encrypt|went away"):
        transfer(elsewhere(owner.offer, fingerprint="ab" * 32))


@encrypted
def test_old_tls_is_not_spoken(owner: ListeningPublisher) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", parts(owner.offer)[0]), timeout=10) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)


@encrypted
def test_an_owner_that_dies_in_the_handshake(owner: ListeningPublisher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def die() -> None:
            listener.accept()[0].close()

        dying = threading.Thread(target=die)
        dying.start()
        with pytest.raises(PeerLost):
            transfer(elsewhere(owner.offer, port=listener.getsockname()[1]))
        dying.join(10)


def test_beyond_loopback_it_encrypts_unless_told_otherwise(region: PublishedRegion) -> None:
    """Where the address is loopback nobody else can listen; 127.0.0.2 by a name that does not say so stands for other addresses."""
    found = {}
    for name, (tcp, encrypt) in {
        "loopback": (Tcp(), None),
        "loopback, on": (Tcp(), True),
        "made so": (Tcp(encrypt=False), True),
        "everywhere": (Tcp("0.0.0.0", advertise="127.0.0.1"), None),
        "everywhere, off": (Tcp("0.0.0.0", advertise="127.0.0.1"), False),
    }.items():
        owner = tcp.publish(region, KEY, this_host(), Network(encrypt=encrypt))
        found[name] = bool(parts(owner.offer)[2])
        assert owner.offer.traits.encrypted == found[name]
        owner.close()
    assert found == {"loopback": False, "loopback, on": True, "made so": False, "everywhere": True, "everywhere, off": False}


def test_what_cannot_encrypt_says_so() -> None:
    with pytest.raises(ConfigurationError, match="'collective' does not encrypt"):
        TrainerRole(STATE, ReaderAccess([Collective()], KEY, this_host(), network=Network(encrypt=True)))


def test_an_offer_that_claims_to_be_encrypted_and_names_no_certificate_is_refused(region: PublishedRegion) -> None:
    owner = Tcp().publish(region, KEY, this_host())
    forged = msgspec.structs.replace(owner.offer, traits=Tcp.traits)
    assert not owner.offer.traits.encrypted
    with pytest.raises(ProtocolError, match="no certificate"):
        Tcp().open(forged, KEY, Deadline(5))
    owner.close()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3, 4))


STATE = {"a": torch.arange(12, dtype=torch.float32).reshape(3, 4)}


@pytest.mark.parametrize(("trainer", "engine", "works"), [("on", "on", True), ("on", None, True), (None, "on", False)])
def test_both_sides_agree_or_say_so(monkeypatch: pytest.MonkeyPatch, trainer: str | None, engine: str | None, works: bool) -> None:
    """On loopback, where a trainer that was told nothing does not encrypt; the variable is the one that people set."""
    module = Model()

    def say(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv("WEIGHTSYNC_DATA_ENCRYPTION", raising=False)
        else:
            monkeypatch.setenv("WEIGHTSYNC_DATA_ENCRYPTION", value)

    with BackgroundServer(ServerSettings(port=0)) as server, contextlib.ExitStack() as owned:
        say(trainer)
        publisher = owned.enter_context(weightsync.Trainer(STATE, server.url, rank=0, world_size=1, transports=["tcp"]))
        assert publisher._role.offers[0].address.count("/") == (2 if trainer == "on" else 1)
        say(engine)
        owned.enter_context(weightsync.Engine(weightsync.ModuleAdapter(module), "r", server.url, transports=["tcp"]))
        if works:
            assert publisher.publish(1, timeout=20).ok
            assert torch.equal(module.a, STATE["a"])
        else:
            with pytest.raises(weightsync.RoundFailed):
                publisher.publish(1, timeout=20)
            said = [replica.error for replica in server.coordinator.status().replicas]
            assert "WEIGHTSYNC_DATA_ENCRYPTION" in str(said)
            assert not torch.equal(module.a, STATE["a"])
