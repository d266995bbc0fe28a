"""The contract of a transport: how bytes cross from a trainer rank's memory to an engine rank's. Transports know no model.

A :class:`Transport` makes both ends. At the trainer rank, :meth:`Transport.publish` returns a :class:`Publisher`: it lets
authenticated readers reach one region, which is memory of the host
(:class:`~weightsync.transports.host.region.PublishedRegion`) or of a GPU
(:class:`~weightsync.transports.cuda.region.CudaRegion`). At the engine rank, :meth:`Transport.open` returns a :class:`Reader`: one
connection to one publisher. What a transport can do is in its :class:`~weightsync.protocol.messages.Traits`, which travel in each
offer.

The reader dictates the geometry: which bytes of which region go where, as :class:`~weightsync.tensors.copy_table.CopyTable`, given
once by :meth:`Reader.prepare` and used every round. A transport either **maps** the publisher's memory and copies tiles by itself
(``live_source``), or **streams** them: the publisher packs the tiles that were asked for and sends them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.protocol.messages import Host, Offer, Traits

if TYPE_CHECKING:
    from weightsync.tensors.copy_table import CopyTable  # which imports numba


@dataclass(frozen=True)
class Network:
    """What a trainer knows of the network to its readers. A transport's own settings come before it.

    Attributes:
        address: The address of this host that engine ranks reach.
        encrypt: Whether bytes on a network are encrypted; ``None`` leaves it to the transport.
    """

    address: str = "127.0.0.1"
    encrypt: bool | None = None


LOOPBACK = Network()
"""All engine ranks are on this host."""


class Key:
    """A run's key that shows in no ``repr``, log or list of variables. :meth:`reveal` gives the key itself."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        """Return the key, for a proof or a Hello."""
        return self._value

    def __repr__(self) -> str:
        return "<key>"


class Publisher(Protocol):
    """Lets readers reach one region until it is closed.

    Closing is safe at any time and twice. It ends every reader's transfer with an error at the reader, and leaves no thread,
    socket, file or shared memory behind.
    """

    @property
    def offer(self) -> Offer:
        """What a reader needs to connect, with the traits of this publisher."""

    def close(self) -> None:
        """Stop publishing. Returns when nothing is left."""


class Completion(Protocol):
    """A group of tiles that was asked for and may still be on its way."""

    def wait(self, deadline: Deadline) -> None:
        """Return when every byte of the group is in place.

        Raises :class:`~weightsync.errors.PeerLost`, :class:`~weightsync.errors.DeadlineExceeded`,
        :class:`~weightsync.errors.Aborted`, :class:`~weightsync.errors.StaleSource` or :class:`~weightsync.errors.ProtocolError`.
        """


class Reader(ABC):
    """One reader's connection to one publisher. Not thread-safe, except for :meth:`abort`.

    The order of calls is ``prepare`` once per plan; then per round ``begin``, ``submit`` and ``wait`` for each group in ascending
    order, ``end``. After an error the reader may be prepared and begun again unless the error was
    :class:`~weightsync.errors.PeerLost` itself (after :class:`~weightsync.errors.BroadcastBroken` it may); the bytes under the
    targets are then undefined until a later transfer succeeds.
    """

    stream_ordered: ClassVar[bool] = False
    """A submitted group is work on the device's current CUDA stream: what is queued there later sees the bytes without waiting."""

    @property
    def table_bytes(self) -> int:
        """Bytes of device memory that its copy tables take."""
        return 0

    @abstractmethod
    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """Say which bytes will be wanted, group by group (a group may be empty).

        ``CopyTable.region`` and ``CopyTable.source`` are the publisher's regions and byte offsets in them, ``CopyTable.target``
        absolute addresses in this process, which must stay valid until the next ``prepare`` or ``close``. Raises
        :class:`~weightsync.errors.StaleSource` if the publisher's layout has another digest,
        :class:`~weightsync.errors.ProtocolError` if a tile lies outside the publisher's regions.
        """

    def require(self, version: int, deadline: Deadline) -> None:  # noqa: B027 - a transport that streams learns it when it begins
        """Raise :class:`~weightsync.errors.StaleSource` if the publisher is known not to hold this version. Begins nothing.

        Without a live source, nothing is known before :meth:`begin`.
        """

    @abstractmethod
    def begin(self, version: int, deadline: Deadline) -> None:
        """Start a transfer of this version; a publisher that streams starts sending ahead.

        Raises :class:`~weightsync.errors.StaleSource` if the publisher holds another version.
        """

    @abstractmethod
    def submit(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> Completion:
        """Ask for the bytes of a group. They are in place when :meth:`Completion.wait` returns, not earlier.

        With ``digests`` (``uint64[rows of the target's layout]``), the digest of every tile, read back from its target after the
        copy, is added to ``digests[row]`` of its key (:mod:`weightsync.tensors.copies` does both in one pass over memory). Raises
        :class:`~weightsync.errors.ProtocolError` for ``digests`` if the transport's traits say that they come after.
        """

    @staticmethod
    def _check_group(group: int, groups: int) -> None:
        """Refuse a group beyond the ``groups`` that were prepared."""
        if not 0 <= group < groups:
            raise ProtocolError(f"group {group} was not prepared: there are {groups}")

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """Submit a group and wait for it."""
        self.submit(group, deadline, digests).wait(deadline)

    @abstractmethod
    def end(self, deadline: Deadline) -> None:
        """Raise :class:`~weightsync.errors.StaleSource` unless the publisher held this version during the whole transfer."""

    @abstractmethod
    def abort(self) -> None:
        """Make a call that runs in another thread raise :class:`~weightsync.errors.Aborted` soon. Never blocks.

        Between ``begin`` and ``end`` it makes the next call raise; ``prepare`` and ``begin`` clear it, so a caller that can be
        aborted between two transfers remembers that itself.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Safe twice."""


class Deferred:
    """A completion that does the work when it is waited for."""

    def __init__(self, run: Callable[[Deadline], None]) -> None:
        self._run = run

    def wait(self, deadline: Deadline) -> None:
        """See :meth:`Completion.wait`."""
        self._run(deadline)


class BlockingReader(Reader):
    """Base of readers whose :meth:`read` does the work in the caller's thread: a submitted group is read when it is waited for."""

    @abstractmethod
    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """See :meth:`Reader.submit` and :meth:`Completion.wait`."""

    def submit(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> Completion:
        """See :meth:`Reader.submit`."""
        return Deferred(lambda deadline: self.read(group, deadline, digests))


class Transport(ABC):
    """One kind of transport, with its settings. :mod:`weightsync.transports.registry` finds it by :attr:`name`."""

    name: str
    traits: Traits
    before: ClassVar[str] = ""
    """Of a third party's: the built-in transport that comes right after it. Without one it is first, and used only if named."""

    def unavailable(self) -> str | None:
        """Return why it cannot work on this machine and what would help, or ``None`` if it can."""
        return None

    def automatic(self) -> bool:
        """Return whether it is used without being named. By default, unless readers share their fate."""
        return not self.traits.shared_fate

    def condition(self) -> tuple[str, str]:
        """Return for ``weightsync doctor`` what it uses on this machine, and what limits it and would help, or an empty string."""
        return "available", ""

    @abstractmethod
    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """Return whether a reader on ``local_host`` could use this offer. Pure; nothing is tried."""

    @abstractmethod
    def publish(self, region: Any, key: bytes, local_host: Host, network: Network = LOOPBACK) -> Publisher:  # noqa: ANN401
        """Let readers that prove to know ``key`` (the run's secret) reach ``region``, in a memory that the traits name.

        Raises :class:`~weightsync.errors.TransportUnavailable` for memory that it cannot read.
        """

    @abstractmethod
    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> Reader:
        """Connect to the publisher behind ``offer``. Readers that write to a GPU use the current CUDA device.

        Raises :class:`~weightsync.errors.PeerLost` if no publisher answers there, :class:`~weightsync.errors.AuthenticationError`
        if the key is not the publisher's, :class:`~weightsync.errors.DeadlineExceeded`.
        """

    def combine(self, readers: Sequence[Reader]) -> Reader | None:
        """Return one reader that reads from all ``readers`` of this transport at once, or ``None`` if that saves nothing.

        They were prepared with the same number of groups; the combined reader is begun, read, ended and aborted in their place.
        Closing them stays with the caller.
        """
        return None
