"""What an actor rank publishes: the parameters of its training engine, under the names of the rollout's checkpoint.

verl gives a checkpoint engine a generator of whole tensors, and its training engine to one backend of its own only. The training
engine is found where verl makes our object (:func:`training_worker`), so nothing of verl is replaced. Its parameters take the
place of the generator only if they are the checkpoint's tensors: verl may also merge adapters or quantize while it sends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from weightsync.engines.hf_checkpoint import checkpoint_of
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.integrations.megatron import hf_state
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import ShardSource
from weightsync.integrations.updates import calling
from weightsync.model import Manifest
from weightsync.tensors.shards import ShardedState, shards_of, torch_dtype


def _plain(value: Any) -> Any:  # noqa: ANN401 - of PEFT's configuration
    return sorted(value) if isinstance(value, set) else getattr(value, "value", None)


def training_worker() -> Any:  # noqa: ANN401 - verl's
    """Return the actor worker in whose ``init_model`` this is called, with its training engine; ``None`` outside of one."""
    return calling(lambda own: hasattr(getattr(getattr(own, "actor", None), "engine", None), "get_per_tensor_param"))


def whole_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk verl's generator.

    Raises:
        ConfigurationError: On all ranks: the weights are the frozen base of adapters that verl does not send.
    """
    for name, tensor in weights:
        if ".base_layer." in name:
            raise ConfigurationError(
                f"verl sends {name}, the frozen base of a LoRA adapter, and never the adapter: the rollout would serve the "
                "base model for the whole run. Set actor_rollout_ref.model.lora.merge=True; or, for a rollout of vLLM and an "
                "actor of FSDP, actor_rollout_ref.rollout.load_format=auto, and the adapter is sent alone"
            )
        yield name, tensor


class EngineShards:
    """What can be published of one training engine. Looked at again only if it has another module."""

    def __init__(self, worker: Any) -> None:  # noqa: ANN401 - verl's, or None
        self._engine: Any = None if worker is None else worker.actor.engine
        self._layered = bool(getattr(getattr(worker, "config", None), "rollout", {}).get("layered_summon", False))
        self._module: object = None
        self._made: dict[bool, tuple[ShardSource, Manifest] | WeightSyncError] = {}

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's configuration of a LoRA adapter that verl does not merge, as plain data; ``None`` if there is none to send."""
        module = getattr(self._engine, "module", None)
        configs = getattr(getattr(module, "_fsdp_wrapped_module", module), "peft_config", {})
        if "default" not in configs or self._engine.model_config.lora.get("merge", False):
            return None
        config: dict[str, Any] = json.loads(json.dumps(configs["default"].to_dict(), default=_plain))
        return config

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the adapter's tensors, whole, by verl's own function, once the first is asked for."""
        yield from self._engine.get_per_tensor_param(layered_summon=self._layered, base_sync_done=True)[0]

    def forget(self) -> None:
        """Look at the engine again the next time."""
        self._made.clear()

    def source(self, options: Options, *, direct: bool) -> tuple[ShardSource, Manifest]:
        """Return the source, the same object as long as the engine's module is the same, and its manifest.

        Args:
            options: The user's.
            direct: Whether the rollout's engines take it: then in the dtypes of their checkpoint, by any transport.

        Raises:
            WeightSyncError: The parameters are not what the rollout takes. The message says why.
        """
        if self._module is not getattr(self._engine, "module", None):
            self._made.clear()
        if direct not in self._made:
            self._module = getattr(self._engine, "module", None)
            try:
                self._made[direct] = self._make(options, direct)
            except WeightSyncError as error:
                self._made[direct] = error
        made = self._made[direct]
        if isinstance(made, WeightSyncError):
            raise made
        return made

    def _make(self, options: Options, direct: bool) -> tuple[ShardSource, Manifest]:
        engine = self._engine
        state = _state(engine)
        model = engine.model_config
        made = ShardSource.of_checkpoint(state, checkpoint_of(model.local_path, None, model.hf_config).manifest, options.transports)
        if direct:
            return made
        buffers = isinstance(state, torch.nn.Module)
        own = shards_of(state, include_buffers=buffers)[0]
        as_asked = options.dtypes({spec.name: torch_dtype(spec.dtype) for spec in own})
        manifest = shards_of(state, dtype=as_asked, include_buffers=buffers)[0]
        return ShardSource(state, as_asked, options.shard_transports()), manifest


def _state(engine: Any) -> torch.nn.Module | ShardedState:  # noqa: ANN401 - verl's
    if engine is None:
        raise ConfigurationError("verl does not show its training engine")
    module = getattr(engine, "module", None)
    if getattr(engine, "peft_cls", None) is not None or hasattr(module, "peft_config"):
        raise ConfigurationError("adapters are merged while verl sends the weights")
    if getattr(engine, "_qat_enabled", False):
        raise ConfigurationError("weights are quantized while verl sends them")
    if getattr(engine, "is_param_offload_enabled", False):
        from verl.utils.device import get_device_name  # verl's own engines move their parameters so

        engine.to(get_device_name(), model=True, optimizer=False, grad=False)
    if isinstance(module, FSDPModule):
        return module  # type: ignore[return-value]  # a class that FSDP2 makes of the module's own
    if not isinstance(module, list):
        raise ConfigurationError("the model is sharded by neither FSDP2 (actor.strategy=fsdp2) nor Megatron")
    return hf_state(module, config=engine.model_config.hf_config, bridge=engine.bridge)
