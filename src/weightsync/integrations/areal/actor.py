"""AReaL's FSDP engine with weightsync's weight transfer.

AReaL decides when workflows pause and resume, and counts the versions. A round of weightsync pauses each server for as short as it
can, and resumes it. So AReaL's own calls for that, within ``update_weights``, are left out: they would also resume a server that
did not take the weights.
"""

from __future__ import annotations

import logging
from typing import Any

from areal.engine.fsdp_engine import FSDPPPOActor

from weightsync.errors import ConfigurationError
from weightsync.integrations.updates import check_reached
from weightsync.protocol.messages import RoundResult
from weightsync.releases import warn_if_untested
from weightsync.trainer.trainer import Trainer

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
        warn_if_untested("areal")
        self.weight_update_group_initialized = True  # so that none is made
        super().connect_engine(engine, meta)  # type: ignore[misc]
        self._servers = meta.gen_allocation.parallel.dp_size
        if self._trainer is None:
            # AReaL counts versions by its own steps, which go back when it recovers from a checkpoint: each start is an epoch.
            # Requests are aborted: AReaL submits them again, and labels each part with the version that made it.
            self._trainer = Trainer(
                self.model,
                dtype=self._compute_dtype(),  # type: ignore[attr-defined]
                new_epoch=True,
                pause_mode="abort",
                start_coordinator=False,
            )
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
        check_reached(result, "servers", self._servers)

    def destroy(self) -> None:
        """Leave the coordinator, and do what AReaL does. Servers keep their weights."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()
        super().destroy()  # type: ignore[misc]


class PublishingFSDPActor(PublishesShards, FSDPPPOActor):  # type: ignore[misc]
    """AReaL's FSDP actor with :class:`PublishesShards`. AReaL's controllers name it to their workers by its path."""
