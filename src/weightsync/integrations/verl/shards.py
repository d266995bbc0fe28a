"""Shard to shard: verl's training engine as a source, so that no actor rank gathers whole tensors.

verl gives the training engine only to the backend ``delta_sharded``. With the option ``shards``, :func:`carry_engine` wraps one
method of verl's FSDP engine so that the generator which a backend gets tells of its engine. Where the engine's tensors are not what
the generator would yield (:func:`obstacle`), whole tensors are streamed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weightsync.errors import ConfigurationError

__all__ = ["EngineState", "EngineWeights", "carry_engine", "obstacle"]


class EngineWeights:
    """verl's generator of whole tensors, with the engine that it gathers them from."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]], engine: Any) -> None:  # noqa: ANN401 - verl's
        self._weights, self.engine = weights, engine

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights)


def carry_engine() -> None:
    """Let verl's FSDP engine tell of itself with its generator, in this process. Idempotent.

    Raises:
        ConfigurationError: This verl has no such engine.
    """
    try:
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        inner = FSDPEngine.get_per_tensor_param
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"the option shards needs verl's FSDP engine: {type(error).__name__}: {error}") from None
    if hasattr(inner, "carries_engine"):
        return

    @functools.wraps(inner)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> tuple[EngineWeights, Any]:  # noqa: ANN401 - verl's
        weights, adapter = inner(self, *args, **kwargs)
        return EngineWeights(weights, self), adapter

    get_per_tensor_param.carries_engine = True  # type: ignore[attr-defined]
    FSDPEngine.get_per_tensor_param = get_per_tensor_param


def obstacle(engine: Any) -> str:  # noqa: ANN401 - verl's
    """Why the engine's tensors are not those that its generator yields; empty if they are, up to the gather."""
    from verl.utils.fsdp_utils import fsdp_version

    module = engine.module
    if fsdp_version(module) != 2:
        return "the module is not sharded by FSDP2"
    if hasattr(module, "peft_config"):
        return "the model has adapters"
    if getattr(engine, "_qat_enabled", False):
        return "verl quantizes the tensors"
    stacked = [name for name, tensor in module.state_dict().items() if ".mlp.experts." in name and tensor.dim() > 2]
    return f"verl splits stacked experts, such as {stacked[0]}" if stacked else ""


class EngineState(Mapping[str, torch.Tensor]):
    """The engine's tensors as they are now, whole or DTensors, under the names that its generator uses."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - verl's
        self._engine = engine

    def _now(self) -> dict[str, torch.Tensor]:
        from verl.utils.model import convert_weight_keys

        module = self._engine.module
        named: dict[str, torch.Tensor] = convert_weight_keys(module.state_dict(), module)
        return named

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def items(self) -> Any:  # noqa: ANN401 - a view of one look at the module, not of one for each name
        """Return names and tensors."""
        return self._now().items()
