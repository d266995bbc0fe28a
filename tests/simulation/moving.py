"""Parameters as programs have them: tensors of their own in a module or in shards, moved, replaced, retied, reshaped, offloaded.

What a parameter leaves is other people's memory from then on. Here it is kept, with something else in it, and looked at: nobody may
write there any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tests.simulation.weights import MANIFEST, Memory, Sharing

from weightsync.model import Manifest
from weightsync.tensors.shards import Shard, ShardedState

__all__ = ["MOVES", "MovingMemory"]

MOVES = ("moved", "replaced", "laid out anew", "cast and back")
"""Ways in which parameters get other memory and keep their values."""

_LEFT = 0xA5
"""What memory holds that a parameter has left."""
_ITS_TENSOR = 2
"""References to a storage of which there is one tensor: that, and the object in Python."""


class MovingMemory(Memory):
    """One rank's parameters, each with a storage of its own."""

    def __init__(self, rank: int, ranks: int, sharing: Sharing) -> None:
        super().__init__(rank, ranks, sharing)
        self.module = torch.nn.Module()
        self._owners: list[tuple[dict[str, Any], str]] = []
        """For each shard, where a module keeps its parameter, and under what name."""
        made = torch.zeros(self._shape.nbytes, dtype=torch.uint8)
        self._made, self._parts = made.numpy(), self._shape.parts(made)
        """For copies of all parameters, one after the other."""
        self._left: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        """Everything that parameters ever were: who writes there by mistake must not end this process, too."""
        self._aside: list[torch.Tensor] | None = None
        self._broken: tuple[int, torch.Tensor] | None = None
        for shard in self.shards:
            self._own(shard.name, torch.nn.Parameter(shard.tensor.clone(), requires_grad=False))
        for shard in self.shards:
            path, _, last = shard.name.rpartition(".")
            self._owners.append((self.module.get_submodule(path)._parameters, last))

    def _own(self, name: str, parameter: torch.nn.Parameter) -> None:
        *path, last = name.split(".")
        module = self.module
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        setattr(module, last, parameter)

    def parameters(self) -> list[torch.Tensor]:
        """The live ones, in the order of the shards."""
        return [parameters[name] for parameters, name in self._owners]

    def state(self) -> Any:
        """What a trainer is made of."""
        return self.module if all(shard.box.shape == shard.shape for shard in self.shards) else _State(self)

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All bytes, as :class:`Memory` has them."""
        self._made[:] = 0
        for tensor, part in zip(self.parameters(), self._parts, strict=True):
            if tensor.shape == part.shape:
                part.copy_(tensor)
        return self._made.copy()

    @bytes.setter
    def bytes(self, value: npt.NDArray[np.uint8]) -> None:
        """Memory sets what it makes; here it is made of the parameters."""

    def put(self, content: npt.NDArray[np.uint8]) -> None:
        """Change values in place, as an optimizer does."""
        self._made[:] = content
        for tensor, part in zip(self.parameters(), self._parts, strict=True):
            tensor.data.copy_(part)

    def fill(self, number: int, salt: int) -> None:
        """See :meth:`Memory.fill`."""
        self.put(self._shape.content(number, salt))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """See :meth:`Memory.load`."""
        shard = next(shard for shard in self.shards if shard.name == name)
        index = tuple(slice(a, b) for a, b in zip(shard.box.starts, shard.box.stops, strict=True))
        self.module.get_parameter(name).data.copy_(tensor[index])

    # What programs do.

    def move(self, how: str, which: Sequence[int] | None = None) -> None:
        """Give parameters (all, or ``which``) other memory, with the same values in it."""
        for index in range(len(self.shards)) if which is None else which:
            name = self.shards[index].name
            gone = self.module.get_parameter(name).data
            values = gone.clone()
            if how == "laid out anew" and values.dim() > 1:
                values = values.transpose(0, -1).contiguous().transpose(0, -1)
            elif how == "cast and back" and values.dtype is torch.float32:
                values = values.view(torch.int32).to(torch.int64).to(torch.int32).view(torch.float32)
            if how == "replaced":
                self._own(name, torch.nn.Parameter(values, requires_grad=False))
            else:
                self.module.get_parameter(name).data = values
            self._leave(gone)

    def retie(self) -> None:
        """Let two parameters be parts of one memory: the smaller one takes the values of the larger one's beginning."""
        embed, norm = (self.module.get_parameter(name) for name in ("embed.weight", "layers.0.norm"))
        self._kept += [embed.data, norm.data]
        embed.data = embed.data.contiguous()
        norm.data = embed.data.view(-1)[: norm.numel()]

    def untie(self) -> None:
        """Give every parameter memory of its own again, whatever its values are."""
        for shard in self.shards:
            parameter = self.module.get_parameter(shard.name)
            self._kept.append(parameter.data)
            if parameter.shape != shard.box.shape:
                parameter.data = torch.zeros(shard.box.shape, dtype=parameter.dtype)
            else:
                parameter.data = parameter.data.clone()

    def reshape(self) -> None:
        """A parameter with other elements than before: nothing that a trainer may publish."""
        parameter = self.module.get_parameter(self.shards[0].name)
        self._kept.append(parameter.data)
        parameter.data = torch.zeros((parameter.shape[0] + 1, *parameter.shape[1:]), dtype=parameter.dtype)

    def offload(self) -> None:
        """Give the memory away, as a colocated trainer does, and keep the values elsewhere."""
        if self._aside is None:
            self._aside = [tensor.detach().clone() for tensor in self.parameters()]
            for tensor in self.parameters():
                self._kept.append(tensor.data)
                tensor.data = torch.empty(0, dtype=tensor.dtype)

    def onload(self) -> None:
        """Take memory again."""
        aside, self._aside = self._aside, None
        for tensor, values in zip(self.parameters(), aside or (), strict=False):
            tensor.data = values

    def _leave(self, data: torch.Tensor) -> None:
        """Somebody else has this memory now, unless somebody kept it alive."""
        storage = data.untyped_storage()
        self._kept.append(data)
        if torch._C._storage_Use_Count(storage._cdata) <= _ITS_TENSOR and storage.nbytes() == data.nbytes:
            torch.as_strided(data, (data.numel(),), (1,)).view(torch.uint8).fill_(_LEFT)
            self._left.append(data)

    def strayed(self) -> bool:
        """Whether somebody wrote to memory that a parameter had left. Says so once."""
        for index, data in enumerate(self._left):
            flat = torch.as_strided(data, (data.numel(),), (1,)).view(torch.uint8)
            if int(flat.min()) != _LEFT or int(flat.max()) != _LEFT:
                del self._left[index]
                return True
        return False


class _State(ShardedState):
    """A part of the model, as a framework declares it whose module does not say how it is cut."""

    def __init__(self, memory: MovingMemory) -> None:
        self._memory = memory
        self._declared: list[Shard] = []

    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        tensors = self._memory.parameters()
        before = self._declared
        if not before or any(
            shard.tensor.data_ptr() != tensor.data_ptr()
            or shard.tensor.shape != tensor.shape
            or shard.tensor.stride() != tensor.stride()
            for shard, tensor in zip(before, tensors, strict=True)
        ):
            cut = self._memory.shards
            self._declared = [
                Shard(one.name, one.shape, one.box, tensor.detach()) for one, tensor in zip(cut, tensors, strict=True)
            ]
        return MANIFEST, self._declared
