"""The weights that an engine rank serves to other replicas: readable from a placing until the rank leaves service."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.session import EngineSession
from weightsync.errors import LayoutError, StaleSource
from weightsync.model import Manifest, Version
from weightsync.protocol.messages import Place, Placed
from weightsync.publishing.publication import ReaderAccess
from weightsync.publishing.published_shards import PublishedShards
from weightsync.tensors.shards import Shard, ShardedState, ordered


class _Parameters(ShardedState):
    """The parameters of an engine rank, as its adapter declares them."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session

    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        shards = self._session.shards()
        if shards is None:
            raise LayoutError(f"{self._session.member} does not know where its parameters are any more")
        return self._session.manifest, ordered(self._session.manifest, shards)


class ServedWeights(PublishedShards):
    """What this engine rank serves, published for readers of other replicas.

    A version is in the region from :meth:`place`, which only a rank that serves this version carries out, until :meth:`withdraw`,
    which the session calls when the rank leaves service. Used within turns of the session, except :meth:`abort`.
    """

    def __init__(self, session: EngineSession, access: ReaderAccess) -> None:
        self._session = session
        self._stop = np.zeros(1, np.int8)
        self._placed: tuple[Version, Placed] | None = None
        super().__init__(_Parameters(session), access)

    def place(self, body: Place, deadline: Deadline) -> Placed:
        """Make the version that this rank serves readable.

        Raises:
            StaleSource: It serves no version, or another one.
            Aborted: The call was aborted.
        """
        version = self._session.served_version
        if version is None or version.order != (body.epoch, body.number):
            raise StaleSource(f"{self._session.member} does not serve version {body.number} of epoch {body.epoch} (any more)")
        if self._placed is not None and self._placed[0] == version:
            return self._placed[1]
        self._stop[0] = 0
        self._session.check_abort()  # an abort that came before is not in the flag any more
        failpoints.reached("engine.place")
        started = time.perf_counter()
        self.follow()
        with self.placing(body.number, self._stop, deadline) as digests:
            failpoints.reached("engine.placing")
            self._session.check_abort()
        placed = Placed(digests=digests.astype("<u8").tobytes(), seconds=time.perf_counter() - started)
        self._placed = version, placed
        return placed

    def withdraw(self) -> None:
        """See :meth:`PublishedShards.withdraw`. The version is placed again when it is asked for again."""
        self._placed = None
        super().withdraw()

    def abort(self) -> None:
        """Make a placing in another thread end soon. Never blocks."""
        self._stop[0] = 1
