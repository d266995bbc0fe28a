"""Shards that follow the parameters of a Megatron-core rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch

from weightsync.errors import LayoutError
from weightsync.integrations.megatron.chunk import ModelChunk
from weightsync.model import Manifest
from weightsync.tensors.shards import Shard, ShardedState, Views, dtype_name, ordered

_ADAPTERS = (".to_wrap.", ".adapter.", ".lora_")


class LiveState(ShardedState):
    """The manifest of the whole model, and the boxes of it that one rank's parameters hold.

    Boxes are views of the parameters, but for those whose published values differ by a constant: these are copies, which are
    computed again before each publication.
    """

    def __init__(self, manifest: Manifest, chunks: Sequence[ModelChunk]) -> None:
        self._manifest = manifest
        self._chunks = chunks
        self._place = chunks[0].place
        self._copies = list[tuple[torch.Tensor, float, torch.Tensor]]()
        """Views of parameters, what is added to them, and the memory of what is published instead."""
        self._shards, self._views = self._take()

    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        """Return the manifest and this rank's shards: the same objects until a parameter has other memory."""
        if not self._views.are_of(self._memory()):
            self._shards, self._views = self._take()
        for view, added, published in self._copies:
            torch.add(view, added, out=published)
        return self._manifest, self._shards

    def _memory(self) -> list[torch.Tensor]:
        return [value for chunk in self._chunks for value in chunk.memory()]

    def _take(self) -> tuple[list[Shard], Views]:
        views = Views(self._memory())
        self._copies.clear()
        return ordered(self._manifest, (shard for chunk in self._chunks for shard in self._shards_of(chunk))), views

    @abstractmethod
    def _shards_of(self, chunk: ModelChunk) -> Iterator[Shard]:
        """Yield the shards of one chunk."""

    def _published(self, view: torch.Tensor, added: float) -> torch.Tensor:
        """Return the memory to publish for a view: its own, or that of a copy."""
        if not added:
            return view
        self._copies.append((view, added, torch.empty_like(view, memory_format=torch.contiguous_format)))
        return self._copies[-1][2]

    def _plain(self, name: str, value: torch.Tensor, dtype: str, remedy: str) -> torch.Tensor:
        """Return the memory of a parameter.

        Raises:
            LayoutError: It is not plain memory, not there, or of another dtype.
        """
        data = value.detach()
        if type(data) is not torch.Tensor:
            raise LayoutError(
                f"{name} on {self._place} is a {type(data).__name__}, not plain memory: quantized and distributed tensors have no "
                "rules. Train with plain bfloat16 parameters, or publish a dict of converted tensors"
            )
        if data.numel() and data.untyped_storage().nbytes() == 0:
            raise LayoutError(
                f"{name} on {self._place} has no memory: its storage was resized to zero, as frameworks do to offload a model. "
                "Load the parameters back before publish()"
            )
        if dtype_name(data.dtype) != dtype:
            raise LayoutError(
                f"{name} on {self._place} is {dtype_name(data.dtype)} instead of {dtype}; nothing is converted silently: {remedy}"
            )
        return data


def refuse_adapter(name: str, place: object) -> None:
    """Raise if a parameter belongs to an adapter or to what one wraps.

    Raises:
        LayoutError: It does.
    """
    if any(part in f".{name}" for part in _ADAPTERS):
        raise LayoutError(
            f'{name} on {place} belongs to an adapter (LoRA). Publish the two apart, with hf_state(..., lora="base") and '
            'lora="adapter" (docs/guides/megatron.md), or merge the adapter and give hf_state the merged model'
        )
