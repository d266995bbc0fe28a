"""A store as a source: engine ranks read a stored version of a trainer rank's shards, as they would read its region."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from weightsync.arrays import UInt64
from weightsync.config import variable
from weightsync.daemon_threads import DaemonThreads
from weightsync.deadline import Deadline
from weightsync.errors import (
    AuthenticationError,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    StaleSource,
    TransportError,
    TransportUnavailable,
)
from weightsync.protocol.messages import Host, Offer, Traits, decoding
from weightsync.protocol.store_messages import STORE, StoreAddress
from weightsync.store.catalog import load
from weightsync.store.objects import ObjectStore, missing_library
from weightsync.store.region import StoredRegion
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.base import LOOPBACK, BlockingReader, Network, Transport

_log = logging.getLogger(__name__)


class Store(Transport):
    """Reads from a store. There is nothing to publish by it: a trainer's store writer is no publisher."""

    name = STORE
    traits = Traits(reads=(), writes=("host",), reach="network", encrypted=True)

    def unavailable(self) -> str | None:
        """See :meth:`weightsync.transports.base.Transport.unavailable`."""
        return missing_library()

    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """See :meth:`weightsync.transports.base.Transport.reaches`."""
        return True

    def publish(self, region: Any, key: bytes, local_host: Host, network: Network = LOOPBACK) -> NoReturn:  # noqa: ANN401
        """See :meth:`weightsync.transports.base.Transport.publish`."""
        raise TransportUnavailable("a store is written by trainers with WEIGHTSYNC_STORE, and not a transport to publish by")

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> StoreReader:
        """See :meth:`weightsync.transports.base.Transport.open`. ``key`` is the public key of the run."""
        with decoding("the offer of a store has no address of one"):
            address = msgspec.json.decode(offer.address, type=StoreAddress)
        return StoreReader(address, key)


class StoreReader(BlockingReader):
    """Reads one trainer rank's part of one version, see :class:`~weightsync.transports.base.Reader`.

    A store in this process's own settings replaces the one in the offer.
    """

    def __init__(self, address: StoreAddress, public: bytes) -> None:
        self._address, self._public = address, public
        self._what = f"version {address.number} of epoch {address.epoch} in the store"
        self._thread = DaemonThreads(1, "weightsync-store-open")
        self._aborted, self._closed = Future[None](), False
        self._region: StoredRegion | None = None
        self._layout_digest = ""

    def _open(self) -> None:
        address = self._address
        store = ObjectStore(variable("WEIGHTSYNC_STORE") or address.url)
        version = load(store, address.run, (address.epoch, address.number), self._public)
        if not 0 <= address.rank < len(version.layouts):
            raise ProtocolError(f"{self._what} has no rank {address.rank}")
        layout = version.layouts[address.rank]
        self._layout_digest = layout.digest
        if not self._closed:  # while this ran
            self._region = StoredRegion(store, version.stored.ranks[address.rank].chain, layout.regions[0])

    @property
    def _opened(self) -> StoredRegion:
        if self._region is None:
            raise PeerLost(f"{self._what} is closed")
        return self._region

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`. Opens the store, which may hang: here an abort ends the wait."""
        try:  # an abort that came before this ends it, too
            deadline.result(self._thread.submit(self._open), f"opening {self._what}", self._aborted)
        except (TransportError, AuthenticationError, DeadlineExceeded) as error:
            # The reason stays here: offers come from others, who could look around with them in this engine's network.
            _log.warning("%s cannot be reached: %a", self._what, str(error))
            raise TransportUnavailable(f"{self._what} cannot be reached (this engine rank's own log says why)") from None
        finally:
            self._aborted = Future()
        if layout_digest != self._layout_digest:
            raise StaleSource(f"{self._what} has layout {self._layout_digest}, but the plan was made for {layout_digest}")
        self._opened.prepare(groups)

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`."""
        self.require(version, deadline)
        self._opened.begin()

    def require(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.require`."""
        if version != self._address.number:
            raise StaleSource(f"version {version} was asked for, and this is {self._what}")

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """See :meth:`weightsync.transports.base.Reader.read`."""
        self._check_group(group, self._opened.groups)
        self._opened.read(group, deadline, digests)

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`. What is stored never changes."""

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.abort`."""
        with suppress(InvalidStateError):
            self._aborted.set_result(None)
        if self._region is not None:
            self._region.abort()

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.close`."""
        self._closed = True
        self._thread.close()
        region, self._region = self._region, None
        if region is not None:
            region.close()
