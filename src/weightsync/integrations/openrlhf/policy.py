"""OpenRLHF's policy actors with weightsync's weight transfer.

OpenRLHF decides when an update comes, and brackets it with pauses of its own where training and generation overlap. A round of
weightsync pauses each vLLM only while its weights change, drops its prefix cache and resumes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
from openrlhf.trainer.ray import ppo_actor

from weightsync.config import ClientSettings
from weightsync.errors import ConfigurationError
from weightsync.integrations.openrlhf import actor_class
from weightsync.integrations.updates import GRACE, check_reached, in_thread, overdue_walk
from weightsync.protocol.messages import RoundResult
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer
from weightsync.transports.registry import FROM_HOST_MEMORY

_log = logging.getLogger(__name__)
_PolicyActor: Any = actor_class(ppo_actor.PolicyModelActor)


class PublishesWeights:
    """Replaces the weight transfer of OpenRLHF's ``ActorPPOTrainer``, before which it stands among the bases.

    Coordinator, token and timeouts come from the environment of the training ranks: ``WEIGHTSYNC_COORDINATOR``,
    ``WEIGHTSYNC_TOKEN_FILE`` and the others of :class:`weightsync.config.ClientSettings`.
    """

    transports: Sequence[str] | None = FROM_HOST_MEMORY
    """Transports allowed: those of a copy in host memory, which reach engines of all hosts. With ``None``, engines on GPUs of this
    host read the policy's GPU memory where it holds the whole model, and no others can."""
    stream: Stream = Stream()
    """Staging windows of a rank, where parameters are gathered."""
    strategy: Any
    actor: Any
    result: RoundResult | None = None
    """Result of the last update."""
    _publisher: Trainer | None = None

    def _init_vllm_sync_group(self, backend: str) -> None:
        """Make no process group: vLLM's workers have joined the coordinator."""

    def broadcast_to_vllm(self) -> None:
        """Bring the model as it is now to all engines. OpenRLHF calls it on every rank.

        Raises:
            ConfigurationError: The update is not one of a whole model between separate GPUs.
            RoundFailed: An engine did not take it. Raised on every rank.
            DeadlineExceeded: The update took longer than its timeout, also where this rank is still in a gather that another one
                never joins.
            WeightSyncError: What :class:`weightsync.Trainer`, its wait for replicas and its publications raise.
        """
        trainer = self._publisher or self._join()
        self.result = result = self._stream(trainer) if self._gathers else trainer.publish()
        check_reached(result, "engines", self.strategy.args.vllm.num_engines)

    @property
    def _gathers(self) -> bool:
        """Whether a rank holds parts of parameters in DeepSpeed's own form: then whole ones are gathered and streamed."""
        ds = self.strategy.args.ds
        return bool(ds.zero_stage == 3 or ds.tensor_parallel_size > 1)

    def _join(self) -> Trainer:
        args = self.strategy.args
        if args.ds.lora.rank > 0 or args.ds.load_in_4bit:
            raise ConfigurationError("weightsync publishes whole models: set no LoRA rank, and no load_in_4bit")
        if args.train.colocate_all and not args.train.async_enable:
            raise ConfigurationError("weightsync needs separate GPUs for vLLM: leave out --train.colocate_all")
        self._publisher = trainer = Trainer(
            self.stream if self._gathers else self.actor.model.module,
            transports=self.transports,
            pause_mode="keep",  # as OpenRLHF pauses for partial rollouts: it submits no request again
            start_coordinator=False,
        )
        names = trainer.wait_for_replicas(args.vllm.num_engines)
        _log.info("OpenRLHF's policy rank %d publishes to %s", trainer.rank, ", ".join(names))
        return trainer

    def _stream(self, trainer: Trainer) -> RoundResult:
        """Stream in a thread of its own: a gather waits for the other ranks as long as the process group does, up to an hour."""
        seconds = ClientSettings.load().timeouts.publish
        walk = in_thread(lambda: trainer.publish_stream(self._whole(), timeout=seconds))
        try:
            return walk.result(seconds + GRACE)
        except TimeoutError:
            return overdue_walk(walk, f"policy rank {trainer.rank}", seconds)

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather one parameter after the other, on every rank, as OpenRLHF does."""
        model, ds = self.actor.model.module, self.strategy.args.ds
        for name, parameter in model.named_parameters():
            if ds.tensor_parallel_size > 1:
                gathered = deepspeed.module_inject.layers.GatherReplacedLayerParams([parameter], model, enabled=True)
            else:
                gathered = deepspeed.zero.GatheredParameters([parameter], enabled=ds.zero_stage == 3)
            with gathered:
                yield name, parameter.data


class PublishingActorTrainer(PublishesWeights, ppo_actor.ActorPPOTrainer):  # type: ignore[misc]
    """OpenRLHF's trainer of the policy with :class:`PublishesWeights`."""


class PublishingPolicyActor(_PolicyActor):  # type: ignore[misc]
    """OpenRLHF's policy actor, which makes a :class:`PublishingActorTrainer`."""

    def init_model_from_pretrained(self, *args: object, **kwargs: object) -> None:
        """Replace the trainer's class in this process, and go on as OpenRLHF does."""
        ppo_actor.ActorPPOTrainer = PublishingActorTrainer
        super().init_model_from_pretrained(*args, **kwargs)
