"""A trainer rank's part of the tensors of a stream, kept from one publication to the next, so that only changes need to cross."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, ManifestMismatch, SharedMemoryTooSmall, few
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.publishing.published_shards import ShardOptions
from weightsync.tensors.shards import Shard, ShardedState, torch_dtype
from weightsync.trainer.maxima_group import MaximaGroup
from weightsync.trainer.stream import StreamRole, stream_item
from weightsync.trainer.stream_plan import published_spec
from weightsync.transports.host.memory import available_bytes


class KeptStream(ShardedState):
    """Host memory for an equal part of the rows of each tensor of a stream; one with few rows is kept whole, by one of the ranks.

    Args:
        stream: What converts and quantizes the tensors.
        rank: This trainer rank.
        world_size: Number of trainer ranks. Each gets the whole stream.
        ranks: All trainer ranks, if there are several.
        deltas: See :class:`weightsync.Trainer`.
    """

    def __init__(self, stream: StreamRole, rank: int, world_size: int, ranks: MaximaGroup | None, deltas: bool | int) -> None:
        self.options = ShardOptions(deltas=deltas)
        self.joined = False
        """Whether the coordinator knows the tensors that are kept."""
        self._rank, self._world_size, self._ranks = rank, world_size, ranks
        self._formats, self._dtype = stream.formats, stream.dtype if stream.formats is None else None
        self._kept: list[tuple[TensorSpec, Shard]] = []
        self._manifest, self._shards = Manifest(()), list[Shard]()
        self._turn = 0

    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        """See :class:`~weightsync.tensors.shards.ShardedState`."""
        return self._manifest, self._shards

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]], deadline: Deadline) -> bool:
        """Keep what an iterator brings, and walk it to its end in any case. Every rank calls it.

        Returns:
            Whether all ranks must join again, because one of them did not know these tensors before.

        Raises:
            ConfigurationError: An item is no name with a plain tensor, a tensor cannot be published, or there are no bytes.
            ManifestMismatch: A name came twice.
            SharedMemoryTooSmall: There is no memory for a tensor.
            DeadlineExceeded: The iterator took too long.
            Aborted: Another rank could not.
        """
        self._turn += 1
        if self._ranks is not None:
            self._ranks.order = self._turn
        try:
            self._take_all(tensors)
            deadline.remaining("gathering a stream")  # the group would be broken by a wait for which no time is left
        except BaseException:
            if self._ranks is not None:
                self._ranks.give_up()
            raise
        others = torch.tensor([not self.joined], dtype=torch.int64)
        self.meet(deadline, others)
        return bool(others)

    def meet(self, deadline: Deadline, maxima: torch.Tensor | None = None) -> None:
        """Wait for the other ranks, and take ``maxima`` with them."""
        if self._ranks is not None:
            self._ranks.all_max(torch.zeros(1) if maxima is None else maxima, deadline)

    def _take_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        count, failure = 0, None
        if self._formats is not None:
            self._formats.begin()
        for item in tensors:
            if failure is not None:
                continue
            try:
                name, tensor = stream_item(item)
                for part in [(name, tensor)] if self._formats is None else self._formats.published(name, tensor):
                    self._keep(count, *part)
                    count += 1
            except Exception as error:  # noqa: BLE001 - raised when the iterator has been walked
                failure = error
        if failure is not None:
            raise failure
        for part in () if self._formats is None else self._formats.rest():
            self._keep(count, *part)
            count += 1
        if count < len(self._kept):
            self._forget_from(count)
        if not self.joined:
            twice = [name for name, times in Counter(spec.name for spec, _ in self._kept).items() if times > 1]
            if twice:
                raise ManifestMismatch(f"the stream brought {few(twice)} twice")
            self._manifest = Manifest(spec for spec, _ in self._kept)
            self._shards = [shard for _, shard in self._kept]
        if not self._manifest.nbytes:
            raise ConfigurationError("the stream brought no bytes: nothing can be published")

    def _keep(self, index: int, name: str, tensor: torch.Tensor) -> None:
        spec = published_spec(self._dtype, name, tensor)
        if index == len(self._kept) or self._kept[index][0] != spec:
            self._forget_from(index)
            self._kept.append((spec, self._room(index, spec, tensor.is_cuda)))
        _, shard = self._kept[index]
        shard.tensor.copy_(tensor.detach()[shard.box.slices])

    def _forget_from(self, count: int) -> None:
        del self._kept[count:]
        self.joined = False

    def _room(self, index: int, spec: TensorSpec, pinned: bool) -> Shard:
        box = Box.whole(spec.shape)
        if spec.shape:
            rows, ranks = spec.shape[0], self._world_size
            if rows >= ranks:
                first, last = rows * self._rank // ranks, rows * (self._rank + 1) // ranks
            else:
                first, last = 0, rows if index % ranks == self._rank else 0
            box = Box((first, *box.starts[1:]), (last, *box.stops[1:]))
        dtype = torch_dtype(spec.dtype)
        needed, free = box.size * dtype.itemsize, available_bytes()
        if free is not None and free < needed:
            raise SharedMemoryTooSmall(
                f"deltas of a stream keep its tensors in host memory: {spec.name} needs {needed:,} bytes, and {free:,} are free"
            )
        memory = torch.empty(box.shape, dtype=dtype, pin_memory=pinned)
        return Shard(spec.name, spec.shape, box, memory)
