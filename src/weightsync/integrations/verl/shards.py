"""Shard to shard: actor ranks publish their own shards instead of gathering whole tensors. Behind the option ``shards``.

verl gives a checkpoint engine a generator of whole tensors. The training engine behind it goes to one backend of verl's own.
:func:`show_engine` wraps one method of verl's FSDP and Megatron engines, so that the generator names its engine as well. A verl
that passes the engine itself to ``send_weights`` (``docs/integrations/verl.md`` proposes that) needs no wrapper.

The first update streams, and :class:`Walk` notes what verl sends. Shards are published only if the engine's parameters are exactly
these tensors: verl's generator may also merge adapters, quantize, or split fused experts.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.fsdp import FSDPModule

from weightsync.errors import ConfigurationError, WeightSyncError, few
from weightsync.integrations.megatron import hf_state
from weightsync.integrations.stream_options import Options
from weightsync.model import Manifest
from weightsync.tensors.shards import ShardedState, shards_of, torch_dtype

_log = logging.getLogger(__name__)
_ENGINES = {
    "verl.workers.engine.fsdp.transformer_impl": "FSDPEngine",
    "verl.workers.engine.megatron.transformer_impl": "MegatronEngine",
}
_METHOD = "get_per_tensor_param"
_MARK = "_weightsync_shows_engine"


class EngineWeights:
    """What verl's engine yields, with the engine."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], engine: object) -> None:
        self._weights, self.engine = weights, engine

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights)


def show_engine() -> None:
    """Make verl's engines in this process yield :class:`EngineWeights`. Idempotent. Does nothing where they are not imported.

    Raises:
        ConfigurationError: An engine of this verl has no such method.
    """
    for path, name in _ENGINES.items():
        if path in sys.modules:
            kind = getattr(sys.modules[path], name, None)
            method = getattr(kind, _METHOD, None)
            if not callable(method):
                raise ConfigurationError(f"this verl has no {name}.{_METHOD}: leave out the option shards")
            if not hasattr(method, _MARK):
                _show(kind, method)


def _show(kind: Any, method: Callable[..., tuple[Any, Any]]) -> None:  # noqa: ANN401 - a class of verl's
    @wraps(method)
    def get_per_tensor_param(engine: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401 - verl's
        weights, adapter = method(engine, *args, **kwargs)
        return EngineWeights(weights, engine), adapter

    setattr(get_per_tensor_param, _MARK, True)
    setattr(kind, _METHOD, get_per_tensor_param)


class EngineState(Mapping[str, torch.Tensor]):
    """The parameters of a training engine under the names of their checkpoint, looked up at every use: they move when offloaded."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - verl's
        self._module = engine.module

    def _now(self) -> dict[str, torch.Tensor]:
        from verl.utils.model import convert_weight_keys  # what it imports takes seconds, and every process of verl imports this

        now: dict[str, torch.Tensor] = convert_weight_keys(self._module.state_dict(), self._module)
        return now

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Names and tensors of one look at the module."""
        return self._now().items()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


Published: TypeAlias = EngineState | ShardedState
"""The parameters of verl's FSDP2 engine, or the declared shards of its Megatron engine."""


class ShardSource(NamedTuple):
    """What an actor rank publishes its shards of."""

    state: Published
    manifest: Manifest
    """In the dtypes in which they travel."""


def types_of(state: Published) -> list[tuple[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]]]:
    """Return names, shape and dtype of each tensor of ``state``. Tied names of a mapping are separate."""
    if isinstance(state, ShardedState):
        return [(spec.names, (spec.shape, torch_dtype(spec.dtype))) for spec in state.declare()[0]]
    return [((name,), (tuple(tensor.shape), tensor.dtype)) for name, tensor in state.items()]


class Walk:
    """A walk of verl's generator, which notes what it yields, and afterwards whether shards can take its place.

    Raises:
        ConfigurationError: While it yields, on all ranks: the weights are the frozen base of adapters that verl does not send.
    """

    def __init__(self, weights: Any) -> None:  # noqa: ANN401 - verl's generator, with or without its engine, or the engine
        self._engine = getattr(weights, "engine", None)
        if hasattr(weights, _METHOD):
            self._engine, (weights, _) = weights, weights.get_per_tensor_param()
        self._weights = weights
        self._seen: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            if ".base_layer." in name:
                raise ConfigurationError(
                    f"verl sends {name}, the frozen base of a LoRA adapter, and never the adapter: the rollout would serve the "
                    "base model for the whole run. Set actor_rollout_ref.model.lora.merge=True"
                )
            self._seen[name] = tuple(tensor.shape), tensor.dtype
            yield name, tensor

    def source(self, options: Options) -> ShardSource | None:
        """The engine's parameters, if they are what was sent and this rank can publish them; else log why not."""
        try:
            state = self._state()
            self._check_same(state)
            return ShardSource(state, shards_of(state, dtype=options.dtypes(state))[0])
        except WeightSyncError as error:
            _log.warning("weightsync streams whole tensors, although the option shards is set: %s", error)
            return None

    def _state(self) -> Published:
        engine = self._engine
        if engine is None:
            raise ConfigurationError(f"verl does not show its training engine; only these are known: {', '.join(_ENGINES)}")
        module = getattr(engine, "module", None)
        if isinstance(module, FSDPModule):
            return EngineState(engine)
        if not isinstance(module, list):
            raise ConfigurationError("the model is sharded by neither FSDP2 (actor.strategy=fsdp2) nor Megatron")
        if engine.peft_cls is not None or engine._qat_enabled:
            raise ConfigurationError("adapters are merged, or weights quantized, while verl sends them")
        if engine.engine_config.param_offload:
            raise ConfigurationError("param_offload frees the parameters of Megatron between updates")
        return hf_state(module, config=engine.model_config.hf_config, bridge=engine.bridge)

    def _check_same(self, state: Published) -> None:
        held = types_of(state)
        known = {name: kind for names, kind in held for name in names}
        other = {names[0] for names, _ in held if self._seen.keys().isdisjoint(names)}
        other |= {name for name, kind in self._seen.items() if known.get(name) != kind}
        if other:
            raise ConfigurationError(f"verl converts parameters before it sends them ({few(sorted(other), 3)})")
