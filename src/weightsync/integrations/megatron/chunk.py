"""What hf_state() reads off a Megatron-core model: its place among the ranks, its layers and experts, its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightsync.errors import ConfigurationError, LayoutError

_PREDICTED = ("transformer_layer", "mtp_model_layer")
"""The layer inside a prediction layer, by megatron-core's release: 0.16 and later ones."""
_LAYER = re.compile(rf"(decoder|mtp)\.layers\.([0-9]+)\.(?:(?:{'|'.join(_PREDICTED)})\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.([0-9]+)\.(.+)|(.+\.(?:weight|bias))([0-9]+))")
_EXPERTS = "mlp.experts."


@dataclass(frozen=True)
class ParallelPlace:
    """Ranks and sizes of the groups that cut parameters."""

    rank: int
    tensor: tuple[int, int]
    expert: tuple[int, int]
    pipeline: tuple[int, int]
    expert_tensor: tuple[int, int]

    @classmethod
    def of(cls, model: nn.Module) -> ParallelPlace:
        """Return the place of a model, from the process groups that it, or a part of it, was built with."""
        groups = next((module.pg_collection for module in model.modules() if hasattr(module, "pg_collection")), None)
        if groups is None:
            raise ConfigurationError(
                f"{type(model).__name__} has no pg_collection: hf_state takes GPTModel of megatron-core 0.16 or later"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        return cls(rank, *(_rank_and_size(getattr(groups, name, None)) for name in ("tp", "ep", "pp", "expt_tp")))

    def __str__(self) -> str:
        named = (("TP", self.tensor), ("PP", self.pipeline), ("EP", self.expert), ("ETP", self.expert_tensor))
        cuts = ", ".join(f"{name} {rank} of {size}" for name, (rank, size) in named if size > 1)
        return f"trainer rank {self.rank}" + (f" ({cuts})" if cuts else "")


def _rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


class ModelChunk:
    """One model of Megatron-core: the layers of one pipeline stage, or of one virtual stage.

    Layers, their experts and :meth:`locate` are those of a GPTModel, which has a ``decoder``.
    """

    def __init__(self, given: nn.Module) -> None:
        model: Any = given
        while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), nn.Module):
            model = model.module  # Megatron's DistributedDataParallel and Float16Module
        if not hasattr(model, "config"):
            raise ConfigurationError(f"hf_state takes Megatron-core's GPTModel, not a {type(given).__name__}")
        self.model: Any = model
        self.config: Any = model.config
        self._modules: list[nn.Module] = list(model.modules())
        self.place = ParallelPlace.of(model)
        self._numbers: dict[tuple[str, int], int] = {}
        """By the path of its layers and its place there, the number of a layer in the whole model."""
        self._experts: dict[int, list[int]] = {}
        for index, layer in enumerate(getattr(getattr(model, "decoder", None), "layers", ())):
            self._add(("decoder", index), int(layer.layer_number) - 1, layer)
        for index, layer in enumerate(getattr(getattr(model, "mtp", None), "layers", ())):
            inner = next((getattr(layer, name) for name in _PREDICTED if hasattr(layer, name)), layer)
            self._add(("mtp", index), self.config.num_layers + int(layer.layer_number) - 1, inner)

    def _add(self, place: tuple[str, int], number: int, layer: nn.Module) -> None:
        self._numbers[place] = number
        self._experts[number] = list(getattr(getattr(layer, "mlp", None), "local_expert_indices", ()))

    @property
    def layers(self) -> list[int]:
        """Numbers of its layers in the whole model, from zero; prediction layers follow the others."""
        return list(self._numbers.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters, and those buffers that a checkpoint holds."""
        yield from self.model.named_parameters()
        for path, module in self.model.named_modules():
            for name, value in module.named_buffers(path, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, value

    def memory(self) -> list[torch.Tensor]:
        """Return the same tensors without names, of the modules that were there at first: ten times as fast.

        A trainer asks for them before every publication.
        """
        held: list[torch.Tensor | None] = []
        for module in self._modules:
            held += module._parameters.values()
            if module._buffers:
                held += (value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set)
        return [value for value in held if value is not None]

    def locate(self, name: str) -> tuple[int | None, str]:
        """Return the layer of a parameter (``None`` outside layers) and its name there, with the global number of its expert."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return None, name
        number, key = self._numbers[match[1], int(match[2])], match[3]
        expert = _EXPERT.fullmatch(key)
        if expert is not None:
            local, rest = (expert[1], expert[2]) if expert[1] else (expert[4], expert[3])
            if int(local) >= len(self._experts[number]):
                raise LayoutError(f"{name} on {self.place}: its layer has {len(self._experts[number])} experts")
            key = f"{_EXPERTS}{self._experts[number][int(local)]}.{rest}"
        return number, key

    def holds(self, layer: int | None, key: str) -> bool:
        """Return whether a parameter of this place in the whole model belongs in this chunk."""
        if layer is None:
            if key == "decoder.final_layernorm.weight" and hasattr(self.model.decoder, "final_layernorm"):
                # With prediction layers it is in the stage of the last decoder layer, which may not be the last stage.
                return self.model.decoder.final_layernorm is not None
            return bool(self.model.pre_process if key.startswith("embedding.") else self.model.post_process)
        if layer not in self._experts:
            return False
        expert = expert_number(key)
        return expert is None or expert in self._experts[layer]


def expert_number(key: str) -> int | None:
    """Return the number of the expert in the whole model to which a rule's key belongs, or ``None`` outside experts."""
    return int(key.split(".")[2]) if key.startswith(_EXPERTS) else None
