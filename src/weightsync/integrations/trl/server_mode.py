"""TRL's trainers with ``vllm_mode="server"``. They have no argument for their weight transfer: two names of TRL are substituted."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weightsync.errors import ConfigurationError
from weightsync.integrations.releases import SERIES, warn_if_untried
from weightsync.integrations.trl.transfer import JoinOptions, WeightTransfer
from weightsync.protocol.messages import RoundResult
from weightsync.tensors.shards import DTypes
from weightsync.trainer.agent import Trainer
from weightsync.transports.base import Transport

__all__ = ["NEEDED", "ServerModePublisher", "check_interface", "enable"]

NEEDED = {
    "VLLMClient": ("init_communicator", "update_named_params"),
    "VLLMGeneration": ("_init_vllm", "_iter_named_params", "sync_weights"),
}
"""What is substituted or called of ``trl.generation.vllm_generation``."""
_OWN = "_weightsync"
_live = weakref.WeakSet["ServerModePublisher"]()


def enable(
    coordinator: str | None = None,
    *,
    token: str | None = None,
    dtype: DTypes = torch.bfloat16,
    replicas: int = 1,
    timeout: float = 600.0,
    transports: Sequence[Transport | str] | None = None,
) -> None:
    """Make TRL's trainers with ``vllm_mode="server"`` publish through weightsync. Call it on every rank, before making a trainer.

    Trainers with ``vllm_mode="colocate"`` are unchanged. A second call replaces the options for later trainers. The arguments are
    those of :class:`WeightTransfer`.

    Raises:
        CoordinatorUnreachable: No coordinator answers at its address.
        AuthenticationError: The token is wrong.
        ConfigurationError: This TRL lacks what is substituted. The message names it.
    """
    from trl.generation import vllm_generation

    options = JoinOptions(coordinator, token, dtype, replicas, timeout, transports)
    check_interface(vllm_generation, NEEDED)
    warn_if_untried("trl")
    options.check()
    kind = vllm_generation.VLLMGeneration
    client: Any
    client, own = getattr(kind, _OWN, (vllm_generation.VLLMClient, kind.sync_weights))
    setattr(kind, _OWN, (client, own))

    class WithoutCommunicator(client):  # type: ignore[misc]
        """TRL's client for generation; weights go another way."""

        def init_communicator(self, device: object = 0) -> None:
            """Do nothing: vLLM's workers have joined the coordinator."""

        def update_named_params(self, metadata: object, named_params: object) -> None:
            """Refuse: somebody else than the trainer's own synchronization asks for it."""
            raise ConfigurationError("weights of this trainer go through weightsync: call vllm_generation.sync_weights()")

    def sync_weights(generation: Any) -> None:  # noqa: ANN401 - TRL's
        if generation.mode != "server":
            own(generation)
            return
        publisher = generation.__dict__.get(_OWN)
        if publisher is None:
            publisher = generation.__dict__[_OWN] = ServerModePublisher(generation, options)
        publisher.publish(generation)

    vllm_generation.VLLMClient = WithoutCommunicator
    kind.sync_weights = sync_weights


def check_interface(module: object, needed: Mapping[str, Sequence[str]]) -> None:
    """Check that ``module`` has each class in ``needed`` with its methods.

    Raises:
        ConfigurationError: Something is missing. The message names it.
    """
    lacking = [
        f"{kind}.{method}"
        for kind, methods in needed.items()
        for method in methods
        if not callable(getattr(getattr(module, kind, None), method, None))
    ]
    if lacking:
        tried = SERIES["trl"].tried
        raise ConfigurationError(
            f"this TRL ({getattr(module, '__name__', module)}) has no {', '.join(lacking)}: weightsync was tried with TRL {tried}"
        )


class ServerModePublisher:
    """Publishes the model of one ``VLLMGeneration``, on every rank.

    Each rank publishes its own shards where they can be derived from its parameters: one process, DDP, FSDP2, ZeRO up to stage 2.
    Under FSDP1 and ZeRO-3 TRL gathers whole tensors on all ranks, and rank 0 publishes these.
    """

    def __init__(self, generation: Any, options: JoinOptions) -> None:  # noqa: ANN401 - TRL's
        for earlier in list(_live):  # a run has one trainer, and TRL does not say when it is done with one
            earlier.close()
        _live.add(self)
        self._options = options
        self._main = bool(generation.accelerator.is_main_process)
        backend = generation._dist
        self._gathered = WeightTransfer(**vars(options)) if backend.is_zero3 or backend.fsdp_version == 1 else None
        self._trainer: Trainer | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self.result: RoundResult | None = None
        """Result of the last update; with gathered weights on rank 0 alone."""

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
                for _ in weights:  # the other ranks gather to the end, whatever fails here
                    pass
            return
        with _merged(generation.model) as state:
            if self._trainer is None:
                self._trainer = self._options.join(state)
                self._closer = weakref.finalize(self, self._trainer.close)
            number = self._options.number(self._trainer)
            self.result = self._trainer.publish(number, timeout=self._options.timeout)

    def close(self) -> None:
        """Leave the coordinator. Replicas keep their weights. Safe twice; another update joins again."""
        self._trainer = self.result = None
        if self._closer is not None:
            self._closer()


@contextmanager
def _merged(model: Any) -> Iterator[torch.nn.Module | dict[str, torch.Tensor]]:  # noqa: ANN401 - Transformers' or PEFT's
    """The model's parameters under the names of its checkpoint; adapters are merged into them meanwhile."""
    if not hasattr(model, "merge_adapter"):
        yield model
        return
    model.merge_adapter()
    try:
        yield dict(_base_parameters(model))
    finally:
        model.unmerge_adapter()


def _base_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401 - PEFT's
    for name, parameter in model.named_parameters(remove_duplicate=False):  # tied weights with all of their names
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "").replace("_checkpoint_wrapped_module.", "")
        if model.prefix in plain or "original_module" in plain:
            continue
        yield plain.replace("modules_to_save.default.", ""), parameter
