"""TRL's trainers with ``vllm_mode="server"``. They have no argument for their weight transfer: two names of TRL are substituted."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.errors import ConfigurationError, RoundFailed
from weightsync.integrations.trl.model_publisher import MERGING, ModelPublisher
from weightsync.integrations.trl.reporting import calling_trainer, report
from weightsync.integrations.trl.rollout_server import RolloutServer
from weightsync.integrations.trl.transfer import JoinOptions, WeightTransfer
from weightsync.integrations.updates import walk_on
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.notices import tell
from weightsync.releases import check_interface, warn_if_untested
from weightsync.tensors.shards import DTypes
from weightsync.transports.base import Transport

_OWN = "_weightsync"
_log = logging.getLogger(__name__)
_live = weakref.WeakSet["ServerModePublisher"]()


def enable(
    coordinator: str | None = None,
    *,
    token: str | None = None,
    dtype: DTypes = torch.bfloat16,
    replicas: int = 1,
    timeout: float = 600.0,
    transports: Sequence[Transport | str] | None = None,
    wait_for_replicas: float = 0.0,
    adapter: str | None = None,
    merge: bool = False,
) -> None:
    """Make TRL's trainers with ``vllm_mode="server"`` publish through weightsync. Call it on every rank, before making a trainer.

    Trainers with ``vllm_mode="colocate"`` are unchanged, and need no coordinator. A second call replaces the options for later
    trainers. A trainer's constructor then raises :class:`~weightsync.errors.CoordinatorUnreachable` if no coordinator answers,
    :class:`~weightsync.errors.AuthenticationError` if the token is wrong, and
    :class:`~weightsync.errors.ConfigurationError` if the server at its URL has another weight-transfer backend.

    Args:
        coordinator: As for :class:`WeightTransfer`, like ``token``, ``dtype``, ``replicas``, ``timeout`` and ``transports``.
        token: See there.
        dtype: See there.
        replicas: See there.
        timeout: See there.
        transports: See there.
        wait_for_replicas: Seconds to wait for ``replicas`` servers again if an update failed, for example because a server was
            killed and is started again; then the weights are published once more. Default: an update that fails ends the training.
            Without effect under FSDP1 and ZeRO-3, where whole tensors were gathered for the one attempt.
        adapter: As for :class:`WeightTransfer`, like ``merge``.
        merge: See there.

    Raises:
        ConfigurationError: This TRL lacks what is substituted. The message names it.
    """
    from trl.generation import vllm_generation

    options = JoinOptions(
        coordinator, token=token, dtype=dtype, replicas=replicas, timeout=timeout, transports=transports, adapter=adapter or "",
        merge=merge,
    )  # fmt: skip
    check_interface("trl")
    warn_if_untested("trl")
    kind = vllm_generation.VLLMGeneration
    client: Any
    client, own = getattr(kind, _OWN, (vllm_generation.VLLMClient, kind.sync_weights))
    setattr(kind, _OWN, (client, own))

    class WithoutCommunicator(client):  # type: ignore[misc]
        """TRL's client for generation; weights go another way."""

        def init_communicator(self, device: object = 0) -> None:
            """Make no group, as vLLM's workers join the coordinator. Check that they can, and that it answers."""
            options.check()
            RolloutServer(self.base_url).check_backend()

        def update_named_params(self, metadata: object, named_params: object) -> None:
            """Refuse: somebody else than the trainer's own synchronization asks for it."""
            raise ConfigurationError("weights of this trainer go through weightsync: call vllm_generation.sync_weights()")

    def sync_weights(generation: Any) -> None:  # noqa: ANN401 - TRL's
        if generation.mode != "server":
            own(generation)
            return
        publisher = generation.__dict__.get(_OWN)
        if publisher is None:
            publisher = generation.__dict__[_OWN] = ServerModePublisher(generation, options, wait_for_replicas)
        publisher.publish(generation)

    vllm_generation.VLLMClient = WithoutCommunicator
    kind.sync_weights = sync_weights


class ServerModePublisher:
    """Publishes the model of one ``VLLMGeneration``, on every rank.

    Each rank publishes its own shards where they can be derived from its parameters: one process, DDP, FSDP2, ZeRO up to stage 2.
    Under FSDP1 and ZeRO-3 TRL gathers whole tensors on all ranks, and rank 0 publishes these. Of a PEFT model the adapter alone is
    published where that is possible (:class:`ModelPublisher`).
    """

    def __init__(self, generation: Any, options: JoinOptions, wait_for_replicas: float = 0.0) -> None:  # noqa: ANN401 - TRL's
        for earlier in list(_live):  # a run has one trainer, and TRL does not say when it is done with one
            earlier.close()
        self._options, self._wait_seconds = options, wait_for_replicas
        self._asking: object = None
        self._main = bool(generation.accelerator.is_main_process)
        backend = generation._dist
        gathers = backend.is_zero3 or backend.fsdp_version == 1
        server = generation.vllm_client.base_url if self._main else None
        self._server = None if server is None else RolloutServer(server)
        self._gathered = WeightTransfer(**vars(options) | {"server": server}) if gathers else None
        if gathers and self._main and not options.merge and hasattr(getattr(generation, "model", None), "merge_adapter"):
            tell(_log, f"{MERGING} TRL gathers what FSDP1 and ZeRO-3 hold in parts. Under FSDP2 only the adapter is sent")
        self._publisher = ModelPublisher(options, self._server)
        self._named: list[Any] = []
        """What TRL's requests named before they named an adapter."""
        self._closer: weakref.finalize[Any, Any] | None = None
        self.result: RoundResult | None = None
        """Result of the last update; with gathered weights on rank 0 alone."""
        _live.add(self)

    def publish(self, generation: Any) -> None:  # noqa: ANN401 - TRL's
        """Bring the model as it is now to every replica. Raises what :class:`weightsync.Trainer` and its ``publish`` raise."""
        if self._gathered is not None:
            weights = generation._iter_named_params()
            try:
                if self._main:
                    if self.result is None:
                        self._gathered.init_weight_transfer()
                        self._closer = weakref.finalize(self, self._gathered.destroy)  # at the end of the process, too
                    self._gathered.send_weights(weights)
                    self.result = self._gathered.result
            finally:
                walk_on(weights)  # whatever fails here
            return
        self._asking = self._asking or calling_trainer()
        options = self._options
        try:
            self.result = self._attempt(generation)
        except RoundFailed as error:  # on every rank
            trainer = self._publisher.trainer
            if not self._wait_seconds or trainer is None:
                raise
            if self._main:
                tell(_log, f"{error}. Waiting up to {self._wait_seconds:g} s for {options.replicas} replicas, to publish again")
            trainer.wait_for_replicas(options.replicas, self._wait_seconds)
            if self._publisher.base is not None:  # a server that came back loaded its own
                trainer.publish(timeout=options.timeout)
            self.result = self._attempt(generation)
        if self._main:
            report(self.result, self._asking)

    def _attempt(self, generation: Any) -> RoundResult:  # noqa: ANN401 - TRL's
        self._publisher = self._publisher.of(generation.model)
        result = self._publisher.publish(generation.model, self._asking)
        if self._publisher.adapter and self._main:
            self._named = self._named or [getattr(generation.vllm_client, "model", None)]
            generation.vllm_client.model = str(result.version)  # what TRL's requests name
        elif self._named:
            generation.vllm_client.model = self._named.pop()
        return result

    def close(self) -> None:
        """Leave the coordinator. Replicas keep their weights. Safe twice; another update joins again."""
        self._publisher.close()
        self._publisher, self.result = ModelPublisher(self._options, self._server), None
        if self._closer is not None:
            self._closer()
