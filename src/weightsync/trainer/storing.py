"""A trainer rank's store writer, made from its settings."""

from __future__ import annotations

import logging

from weightsync.config import ClientSettings
from weightsync.errors import ConfigurationError, DeadlineExceeded, WeightSyncError
from weightsync.model import Version
from weightsync.protocol.messages import RoundResult
from weightsync.store.objects import ObjectStore
from weightsync.store.writer import CoordinatorCall, PublishedBytes, RankObjects, StoreWriter
from weightsync.trainer.stream import StreamRole
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.host.region import PublishedRegion

_log = logging.getLogger(__name__)


class Storing:
    """Stores what a trainer rank publishes, if its settings name a store.

    Raises:
        ConfigurationError: The rank keeps no copy of its weights in host memory.
        TransportError: The store cannot be written.
    """

    def __init__(self, settings: ClientSettings, role: TrainerRole | StreamRole, rank: int, call: CoordinatorCall) -> None:
        self._seconds, self._role = settings.timeouts.publish, role
        self.writer: StoreWriter | None = None
        if settings.store is None:
            return
        if isinstance(role, StreamRole) or not isinstance(role.region, PublishedRegion) or role.live:
            raise ConfigurationError(
                "WEIGHTSYNC_STORE needs a copy of the weights in host memory that stays after a publication: make the trainer of a "
                'module, with transports=["shared_memory", "tcp"] where the weights are on a GPU, and without seeds=False'
            )
        store = ObjectStore(settings.store)
        store.check_writable()
        objects = RankObjects(store, rank, role.manifest, role.layout)
        self.writer = StoreWriter(objects, store, rank, call, self._seconds, settings.store_keep)

    def published(self, result: RoundResult) -> None:
        """Store the version of this result in the background."""
        role = self._role
        if self.writer is None or isinstance(role, StreamRole) or not isinstance(role.region, PublishedRegion):
            return
        try:
            payload, header = role.region.payload, role.region.header
            stamp = header.require(result.version.number)
        except WeightSyncError as error:  # the trainer is being closed
            _log.warning("version %s is not in the store: %s", result.version, error)
            return
        changes = role.changes
        changed = changes.changed[0] if changes is not None and changes.changed else None  # since the version before
        published = PublishedBytes(payload, changed, lambda: header.require_unchanged(stamp))
        self.writer.store(result.version, result.step, published)

    def wait(self, timeout: float | None) -> Version | None:
        """See :meth:`weightsync.Trainer.wait_until_stored`."""
        if self.writer is None:
            return None
        if not self.writer.wait(self._seconds if timeout is None else timeout):
            raise DeadlineExceeded("the last version is not in the store yet")
        return self.writer.last

    def close(self, timeout: float | None = None) -> None:
        """Wait until the last version is stored, at most ``timeout`` seconds, or as long as the settings say. Safe twice."""
        if self.writer is not None:
            self.writer.close(self._seconds if timeout is None else timeout)
