"""Weights that say in every element of which version it is; and the engine that serves them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.errors import DeadlineExceeded
from weightsync.model import Manifest, PauseMode, TensorSpec, Version
from weightsync.tensors.shards import Shard, shard

__all__ = ["MANIFEST", "NAMES", "SHAPE", "Answer", "Weights", "fill"]

SHAPE = (64, 256)
NAMES = tuple(f"layer.{index}.weight" for index in range(16))
MANIFEST = Manifest([TensorSpec(name, SHAPE, "int32") for name in NAMES])
_SHIFT = 18  # the version above, tensor and place below: versions up to 8191

Answer = dict[str, object]
"""``label``: the version that the server says, ``None`` while it does not serve; ``versions``: those that its weights are of."""


def _places(index: int, first: int, rows: int) -> torch.Tensor:
    """What distinguishes the elements of one version: ``int32[rows, 256]`` for tensor ``index`` from row ``first`` on."""
    row = torch.arange(first, first + rows, dtype=torch.int32).unsqueeze(1) * SHAPE[1]
    return row + torch.arange(SHAPE[1], dtype=torch.int32) + (index << 14)


def _marks(places: torch.Tensor, version: int, every: int) -> torch.Tensor:
    """The version of each element of ``version``, shifted: a version changes one of ``every`` elements, each in its turn."""
    return (version - (version - places) % every).clamp_(0) << _SHIFT


def fill(tensors: Sequence[torch.Tensor], first: int, version: int, every: int = 1) -> None:
    """Make ``tensors`` (rows from ``first`` on, one of each name) those of ``version``, which changes one of ``every`` elements."""
    for index, tensor in enumerate(tensors):
        places = _places(index, first, tensor.shape[0])
        tensor.copy_(places + _marks(places, version, every))


class Weights(EngineAdapter):
    """Rows of every tensor, and a label: what a request sees, and what a round changes while no request looks."""

    name = "faults"
    pauses_twice = True

    def __init__(self, rank: int, world_size: int, every: int = 1) -> None:
        self._every = every
        rows = SHAPE[0] // world_size
        self._first = rank * rows
        self._tensors = [torch.zeros(rows, SHAPE[1], dtype=torch.int32) for _ in NAMES]
        self._places = [_places(index, self._first, rows) for index in range(len(NAMES))]
        self._shards = [shard(name, tensor, SHAPE, (self._first, 0)) for name, tensor in zip(NAMES, self._tensors, strict=True)]
        self._changed = threading.Condition()
        self._open = False
        self._users = 0
        self._label: int | None = None

    def manifest(self) -> Manifest:
        """Sixteen matrices."""
        return MANIFEST

    def shards(self) -> Sequence[Shard]:
        """This rank's rows."""
        return self._shards

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Wait for the request that looks."""
        with self._changed:
            self._open = False
            if not self._changed.wait_for(lambda: not self._users, timeout):
                raise DeadlineExceeded(f"a request was still running after {timeout:g} s")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take this rank's rows of whole tensors."""
        for name, tensor in tensors:
            own = self._tensors[NAMES.index(name)]
            own.copy_(tensor[self._first : self._first + own.shape[0]])

    def finish(self, version: Version) -> None:
        """Take the label."""
        self._label = version.number

    def resume(self) -> None:
        """Answer again."""
        with self._changed:
            self._open = True

    def forget(self, count: int = len(NAMES)) -> None:
        """Lose the first ``count`` tensors, while paused."""
        for tensor in self._tensors[:count]:
            tensor.zero_()

    def answer(self) -> Answer:
        """Look at every element, as a forward pass would; one request at a time."""
        with self._changed:
            if not self._open:
                return {"label": None, "versions": []}
            self._users += 1
            label = self._label
        versions: set[int] = set()
        for tensor, places in zip(self._tensors, self._places, strict=True):
            marks = tensor - places  # the version, shifted, where every element is in its place
            newest = int(marks.max()) >> _SHIFT
            wrong = marks[marks != _marks(places, newest, self._every)]
            versions |= {newest, *(wrong >> _SHIFT).tolist()}
            if len(wrong):
                versions.add(-1)  # bytes that this version does not have at this place
        with self._changed:
            self._users -= 1
            self._changed.notify_all()
        return {"label": label, "versions": sorted(versions)}
