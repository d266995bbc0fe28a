"""The converters of Megatron-Bridge, mbridge, and frameworks with functions, called for one parameter without any communication."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.integrations.megatron.chunk import ParallelPlace

_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.([0-9]+)\.(linear_fc[12]\.(?:weight|bias))$")


class Converter(ABC):
    """Converts one parameter of a rank to tensors under Hugging Face names. What other ranks hold of them is NaN."""

    def __init__(self, bridge: Any, place: ParallelPlace) -> None:  # noqa: ANN401
        self._bridge, self._place = bridge, place

    @abstractmethod
    def convert(self, name: str, parameter: torch.Tensor, module: nn.Module, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Convert ``values``, which are shaped like ``parameter`` of ``module``, whose name in the whole model is ``name``.

        Raises:
            LayoutError: The converter has no mapping for this parameter.
        """

    def _parts(self, name: str, values: torch.Tensor) -> list[torch.Tensor]:
        """Return ``values`` at this rank's place among the ranks that hold a part of the parameter."""
        rank, size = self._place.expert_tensor if is_expert(name) else self._place.tensor
        return [values if at == rank else torch.full_like(values, torch.nan) for at in range(size)]


def converter_of(bridge: Any, config: Any, place: ParallelPlace) -> Converter:  # noqa: ANN401
    """Return the converter of what :func:`hf_state` takes as ``bridge``.

    Raises:
        ConfigurationError: It is none of the three kinds.
    """
    model_bridge = getattr(bridge, "_model_bridge", bridge)  # of Megatron-Bridge's AutoBridge
    if hasattr(model_bridge, "mapping_registry"):
        return _MegatronBridge(model_bridge, config, place)
    if hasattr(bridge, "_weight_to_hf_format") and hasattr(bridge, "_weight_merge_across_tp"):
        return _MBridge(bridge, place)
    if callable(bridge):
        return _Function(bridge, place)
    raise ConfigurationError(
        f"hf_state(bridge=) takes a bridge of Megatron-Bridge or mbridge, or a function of a name and a tensor, and got a "
        f"{type(bridge).__name__}"
    )


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to a routed expert, which expert tensor parallelism cuts."""
    return ".experts." in name


def _names(name: str) -> list[str]:
    """Return the names by which a bridge may know a parameter: that of a grouped MLP, and of norms inside linear layers."""
    names = dict.fromkeys((_LOCAL_EXPERT.sub(r".experts.\2\1", name), name))
    fused = {"input_layernorm": "self_attention.linear_qkv.layer_norm", "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm"}
    for separate, inside in fused.items():
        names |= dict.fromkeys(each.replace(f".{separate}.", f".{inside}_") for each in names)
    return list(names)


class _MegatronBridge(Converter):
    """Megatron-Bridge's own mapping of a parameter, whose gathers find this rank alone."""

    def __init__(self, bridge: Any, config: Any, place: ParallelPlace) -> None:  # noqa: ANN401
        super().__init__(bridge, place)
        if getattr(bridge, "hf_config", None) is None:
            bridge.hf_config = config  # as its own conversions do first
        with self._alone():
            self._registry = bridge.mapping_registry()

    def convert(self, name: str, parameter: torch.Tensor, module: nn.Module, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        with self._alone():
            mapping = next(filter(None, map(self._registry.megatron_to_hf_lookup, _names(name))), None)
            if mapping is None:
                raise LayoutError(f"the bridge has no mapping for {name}")
            converted: Mapping[str, torch.Tensor] = mapping.megatron_to_hf(values, module)
            return converted

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Give mappings groups in which no other rank answers. They ask Megatron for its groups when they are made."""
        from megatron.core import parallel_state

        cuts = {
            "tensor_model": self._place.tensor, "expert_tensor": self._place.expert_tensor, "pipeline_model": (0, 1),
            "expert_model": (0, 1),
        }  # fmt: skip
        names = {f"get_{what}_parallel_group": Alone(*cut) for what, cut in cuts.items()}
        before = {name: getattr(parallel_state, name) for name in names}
        for name, group in names.items():
            setattr(parallel_state, name, lambda *_, group=group, **__: group)
        try:
            yield
        finally:
            for name, getter in before.items():
                setattr(parallel_state, name, getter)


class Alone(dist.ProcessGroup):
    """A process group whose other ranks hold NaN."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def allgather(self, outputs: Any, inputs: Any, _: Any = None) -> Any:  # noqa: ANN401
        """Give every rank's tensor, of which only this rank's is known."""
        for parts, given in zip(outputs, inputs, strict=True):
            for rank, part in enumerate(parts):
                part.copy_(given) if rank == self.rank() else part.fill_(torch.nan)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return _create_work_from_future(done)


class _MBridge(Converter):
    """mbridge's two steps: merge what tensor-parallel ranks hold, and rename."""

    def convert(self, name: str, parameter: torch.Tensor, module: nn.Module, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        known_as = next(filter(self._knows, _names(name)), None)
        if known_as is None:
            raise LayoutError(f"the bridge has no mapping for {name}")
        if getattr(parameter, "tensor_model_parallel", False):
            values = self._bridge._weight_merge_across_tp(known_as, self._parts(name, values), parameter)
        return dict(zip(*self._bridge._weight_to_hf_format(known_as, values), strict=True))

    def _knows(self, name: str) -> bool:
        try:
            return bool(self._bridge._weight_name_mapping_mcore_to_hf(name))
        except (KeyError, NotImplementedError):
            return False


class _Function(Converter):
    """A function of a name and a whole parameter, which gives names and tensors: slime's, AReaL's and ROLL's converters are such.

    The parts of tensor-parallel ranks are put together as these frameworks do: gate and up apart.
    """

    def convert(self, name: str, parameter: torch.Tensor, module: nn.Module, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        name = _LOCAL_EXPERT.sub(r".experts.\2\1", name)
        if getattr(parameter, "tensor_model_parallel", False):
            parts = self._parts(name, values)
            dim = int(getattr(parameter, "partition_dim", 0))
            if "linear_fc1." in name and getattr(getattr(module, "config", None), "gated_linear_unit", True):
                halves = [part.chunk(2) for part in parts]
                parts = [gate for gate, _ in halves] + [up for _, up in halves]
            elif is_expert(name) and "linear_fc2.weight" in name:
                dim = 1  # grouped experts may say 0
            values = torch.cat(parts, dim)
        return dict(self._bridge(name, values))


def with_config(module: nn.Module, config: Any) -> nn.Module:  # noqa: ANN401
    """Return ``module``, or a copy that has ``config``: mappings read it, and not all modules of a model have one."""
    if hasattr(module, "config"):
        return module
    module = copy(module)
    module.config = config
    return module
