"""The tensors of a stream, kept from one publication to the next, so that only changes need to cross."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from weightsync.errors import ConfigurationError, ManifestMismatch, SharedMemoryTooSmall
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.tensors.shards import Shard, ShardedState, torch_dtype
from weightsync.trainer.stream import StreamRole, stream_item
from weightsync.trainer.stream_plan import published_spec
from weightsync.transports.host.memory import available_bytes

_Named = tuple[str, torch.Tensor]


class KeptStream(ShardedState):
    """Host memory for all tensors of a stream, which ``stream`` converts and quantizes."""

    def __init__(self, stream: StreamRole) -> None:
        self._formats, self._dtype = stream.formats, stream.ring.dtype
        self._kept: dict[str, tuple[TensorSpec, Shard]] = {}
        self._free: int | None = None
        self._declared = Manifest(()), list[Shard]()

    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        """See :class:`~weightsync.tensors.shards.ShardedState`."""
        return self._declared

    def take(self, tensors: Iterable[_Named]) -> Manifest:
        """Keep what an iterator brings, walk it to its end in any case, and return the manifest: another one for other tensors.

        Raises:
            ConfigurationError: An item is no name with a plain tensor, a tensor cannot be published, or there are no bytes.
            ManifestMismatch: A name came twice.
            SharedMemoryTooSmall: There is no memory for a tensor.
        """
        came, failure = set[str](), None
        self._free = available_bytes()
        if self._formats is not None:
            self._formats.begin()
        for item in tensors:
            if failure is None:
                try:
                    name, tensor = stream_item(item)
                    self._keep([(name, tensor)] if self._formats is None else self._formats.published(name, tensor), came)
                except Exception as error:  # noqa: BLE001 - raised when the iterator has been walked
                    failure = error
        if failure is not None:
            raise failure
        self._keep(() if self._formats is None else self._formats.rest(), came)
        self._kept = {name: kept for name, kept in self._kept.items() if name in came}
        specs = [spec for spec, _ in self._kept.values()]
        if specs != list(self._declared[0]):
            self._declared = Manifest(specs), [shard for _, shard in self._kept.values()]
        if not self._declared[0].nbytes:
            raise ConfigurationError("the stream brought no bytes: nothing can be published")
        return self._declared[0]

    def _keep(self, parts: Iterable[_Named], came: set[str]) -> None:
        for name, tensor in parts:
            if name in came:
                raise ManifestMismatch(f"the stream brought {name} twice")
            came.add(name)
            spec = published_spec(self._dtype, name, tensor)
            if name not in self._kept or self._kept[name][0] != spec:
                self._kept[name] = spec, self._room(spec, tensor.is_cuda)
            self._kept[name][1].tensor.copy_(tensor.detach())

    def _room(self, spec: TensorSpec, pinned: bool) -> Shard:
        if self._free is not None:
            if self._free < spec.nbytes:
                raise SharedMemoryTooSmall(
                    f"deltas of a stream keep its tensors in host memory: {spec.name} needs {spec.nbytes:,} bytes, "
                    f"and {self._free:,} are free"
                )
            self._free -= spec.nbytes
        with torch.inference_mode(False):  # kept for others
            memory = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cpu", pin_memory=pinned)
        return Shard(spec.name, spec.shape, Box.whole(spec.shape), memory)
