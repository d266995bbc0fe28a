"""How one Megatron-core parameter is put together from rows of Hugging Face tensors, and which of them a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weightsync.errors import LayoutError
from weightsync.model import Box


@dataclass(frozen=True)
class Part:
    """A run of one Hugging Face tensor of ``shape``, along the dimension of the :class:`Packing` that it belongs to.

    The run begins at ``start`` and has ``length`` elements: by default the whole tensor. ``index`` chooses one slice of a stacked
    tensor: with ``(3,)``, the part is in expert 3 of ``[experts, rows, columns]``, and ``start`` counts rows.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    length: int | None = None
    index: tuple[int, ...] = ()

    def extent(self, dim: int) -> int:
        """Return the elements of the run, if it goes along dimension ``dim`` of the Megatron parameter."""
        return self.shape[len(self.index) + dim] - self.start if self.length is None else self.length

    def local_shape(self, dim: int) -> tuple[int, ...]:
        """Return the shape of a Megatron parameter that holds this part alone."""
        shape = list(self.shape[len(self.index) :])
        shape[dim] = self.extent(dim)
        return tuple(shape)

    def box(self, dim: int, offset: int, length: int) -> Box:
        """Return the box of elements ``offset`` to ``offset + length`` of the run, in the Hugging Face tensor."""
        starts = [*self.index, *([0] * (len(self.shape) - len(self.index)))]
        stops = [*(index + 1 for index in self.index), *self.shape[len(self.index) :]]
        axis = len(self.index) + dim
        starts[axis] = self.start + offset
        stops[axis] = starts[axis] + length
        return Box(tuple(starts), tuple(stops))


@dataclass(frozen=True)
class PackedPiece:
    """A box of the Hugging Face tensor of ``part``, and its place in a rank's parameter, along the packing's dimension."""

    part: Part
    box: Box
    start: int
    stop: int


@dataclass(frozen=True)
class Packing:
    """The parts that one parameter stacks along dimension ``dim``, in the order that they have without tensor parallelism.

    A rank holds an equal run of the stack, or all of it. ``dtype`` is given for a parameter that does not have the model's.
    """

    parts: tuple[Part, ...]
    dim: int = 0
    cut: bool = True
    """Whether tensor parallelism may cut it. If not, every rank holds all of it."""
    interleaved: bool = False
    """Every part is cut by itself, and a rank stacks its share of each: a gated MLP holds ``[gate; up]`` of its own rows."""
    padded: bool = False
    """Rows that no Hugging Face tensor has follow the stack: a vocabulary is filled up until it can be cut."""
    dtype: str | None = None
    norm: bool = False
    """The weight of a norm, which Megatron may store minus one."""

    def runs(self, shape: tuple[int, ...], rank: int, size: int) -> list[tuple[int, int]]:
        """Return which runs of the stack, from start to stop, a parameter of ``shape`` holds one after the other.

        Args:
            shape: Of the parameter on this rank.
            rank: Tensor-parallel rank.
            size: Tensor-parallel ranks.

        Raises:
            LayoutError: A parameter of that shape is neither the whole stack nor a rank's run.
        """
        self._check(shape, size)
        length = shape[self.dim]
        if length == self.total and not self.padded:
            return [(0, length)]
        if not self.interleaved:
            return [(rank * length, (rank + 1) * length)]
        runs, begin = list[tuple[int, int]](), 0
        for part in self.parts:
            share = part.extent(self.dim) // size
            runs.append((begin + rank * share, begin + (rank + 1) * share))
            begin += part.extent(self.dim)
        return runs

    def pieces(self, runs: Iterable[tuple[int, int]]) -> Iterator[PackedPiece]:
        """Yield what ``runs`` of the stack hold, without the padding."""
        place = 0
        for first, last in runs:
            begin = 0
            for part in self.parts:
                end = begin + part.extent(self.dim)
                low, high = max(first, begin), min(last, end)
                if low < high:
                    start = place + low - first
                    yield PackedPiece(part, part.box(self.dim, low - begin, high - low), start, start + high - low)
                begin = end
            place += last - first

    @property
    def total(self) -> int:
        """Elements of the stack along ``dim``."""
        return sum(part.extent(self.dim) for part in self.parts)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the parameter without tensor parallelism and without padding."""
        shape = list(self.parts[0].local_shape(self.dim))
        shape[self.dim] = self.total
        return tuple(shape)

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        whole, total = list(self.whole_shape), self.total
        local = shape[self.dim] if len(shape) == len(whole) else 0
        fits = [*shape[: self.dim], total, *shape[self.dim + 1 :]] == whole
        if self.padded:
            fits = fits and local * size >= total
        elif local != total:
            fits = fits and self.cut and local * size == total
            fits = fits and (not self.interleaved or all(part.extent(self.dim) % size == 0 for part in self.parts))
        if not fits:
            cut = f", in {size} parts of dimension {self.dim}" if self.cut and size > 1 else ""
            raise LayoutError(f"shape {list(shape)} here; the Hugging Face configuration means {whole}{cut}")
