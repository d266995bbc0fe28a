"""AReaL's FSDP engine with weightsync's weight transfer.

AReaL decides when workflows pause and resume, and counts the versions. A round of weightsync pauses each server for as short as it
can, and resumes it. So AReaL's own calls for that, within ``update_weights``, are left out: they would also resume a server that
did not take the weights.
"""

from __future__ import annotations

import logging
from typing import Any

from areal.engine.fsdp_engine import FSDPPPOActor

from weightsync.config import ClientSettings
from weightsync.errors import ConfigurationError, RoundFailed
from weightsync.integrations.releases import warn_if_untried
from weightsync.protocol.messages import RoundResult
from weightsync.trainer.agent import Trainer

__all__ = ["PublishesShards", "PublishingFSDPActor", "check_engine"]

_log = logging.getLogger(__name__)


class PublishesShards:
    """Replaces the weight transfer of AReaL's ``FSDPEngine``, before which it stands among the bases.

    Coordinator, token and timeouts come from the environment of the training ranks: ``WEIGHTSYNC_COORDINATOR``,
    ``WEIGHTSYNC_TOKEN_FILE`` and the others of :class:`weightsync.config.ClientSettings`.
    """

    config: Any
    model: Any
    result: RoundResult | None = None
    """Result of the last update."""
    _trainer: Trainer | None = None
    _servers = 0

    def connect_engine(self, engine: object, meta: Any) -> None:  # noqa: ANN401 - AReaL's
        """Connect as AReaL does, without its process group, join the coordinator, and wait for all servers of the allocation.

        Raises:
            ConfigurationError: The update is not one of a whole model over the network.
            DeadlineExceeded: Not all servers joined in time. The message says who did, and what the others lack.
            WeightSyncError: What :class:`weightsync.Trainer` raises.
        """
        if self.config.use_lora:
            raise ConfigurationError(
                "weightsync publishes whole models, and AReaL sends LoRA adapters alone: set actor.use_lora=false"
            )
        if meta.type != "xccl" or meta.gen_allocation is None:
            raise ConfigurationError(
                f"weightsync replaces AReaL's updates of type xccl, and this one is {meta.type}: set actor.weight_update_mode=xccl"
            )
        warn_if_untried("areal")
        self.weight_update_group_initialized = True  # so that none is made
        super().connect_engine(engine, meta)  # type: ignore[misc]
        self._servers = meta.gen_allocation.parallel.dp_size
        if self._trainer is None:
            # AReaL counts versions by its own steps, which go back when it recovers from a checkpoint: each start is an epoch.
            url = ClientSettings.load().coordinator.url
            self._trainer = Trainer(self.model, url, dtype=self._compute_dtype(), new_epoch=True)  # type: ignore[attr-defined]
        names = self._trainer.wait_for_replicas(self._servers)
        _log.info("AReaL's training rank %d publishes its shards to %s", self._trainer.rank, ", ".join(names))

    def update_weights(self, meta: Any) -> None:  # noqa: ANN401 - AReaL's
        """Bring the model as it is now to all servers, as version ``meta.version``.

        Raises:
            RoundFailed: A server did not take it. Raised on every rank.
            WeightSyncError: What :meth:`weightsync.Trainer.publish` raises.
        """
        self._check_rollout_engine_connected()  # type: ignore[attr-defined]
        trainer = self._trainer
        if trainer is None:
            raise ConfigurationError("connect_engine() comes before update_weights(), and destroy() after it")
        with self._offload_aware_context():  # type: ignore[attr-defined]
            self.result = result = trainer.publish(meta.version)
        if len(result.updated) < self._servers:
            failures = "; ".join(f"{replica.name}: {replica.error}" for replica in result.missed)
            reached = f"{len(result.updated)} of {self._servers} servers"
            raise RoundFailed(f"version {result.version} reached {reached} ({failures or 'the others have left'})")

    def destroy(self) -> None:
        """Leave the coordinator, and do what AReaL does. Servers keep their weights."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()
        super().destroy()  # type: ignore[misc]


class PublishingFSDPActor(PublishesShards, FSDPPPOActor):  # type: ignore[misc]
    """AReaL's FSDP actor with :class:`PublishesShards`. AReaL's controllers name it to their workers by its path."""


def check_engine() -> None:
    """Check that this AReaL has what :class:`PublishesShards` replaces or calls.

    Raises:
        ConfigurationError: It lacks something. The message names it.
    """
    needed = (
        "connect_engine",
        "update_weights",
        "destroy",
        "_compute_dtype",
        "_offload_aware_context",
        "_check_rollout_engine_connected",
    )
    missing = [name for name in needed if not callable(getattr(FSDPPPOActor, name, None))]
    if missing:
        raise ConfigurationError(f"this FSDPEngine has no {', '.join(missing)}")
