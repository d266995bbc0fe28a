"""Quantized shards: data and scales of matrices of which this rank may hold only parts, with equal bits under any sharding.

Blocks belong to the whole matrix. A block that the border of a shard cuts takes its maximum from all of its parts, so ranks
exchange the maxima of these blocks, and of no others. The rank that holds the first element of a block publishes its scale.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from operator import itemgetter

import numpy as np
import torch

from weightsync.arrays import Bools, Int8, Int64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, ManifestMismatch
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.tensors.cuda.quantization import DeviceBatch
from weightsync.tensors.formats import Format, format_of
from weightsync.tensors.shards import Shard, ordered, torch_dtype

AllMax = Callable[[torch.Tensor, Deadline], None]
"""Replaces each element of a CPU tensor by its maximum over all trainer ranks. Every rank calls it with a tensor of that size."""

ChooseFormats = Callable[..., Mapping[str, Format]]
"""Chooses formats of matrices, by name, for a manifest. With ``whole=False`` that is a part of one: rules may fit nothing."""

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
_MEMBER = re.compile(rf"\b({'|'.join(name for group in _FUSED for name in group)})\b")
_JOIN_SECONDS = 60.0
_CHUNK = {"cpu": 1 << 18}  # elements that torch encodes at a time
_CHUNK_ELSEWHERE = 1 << 24
KERNELS_ON = {"cuda"}
"""Types of devices whose shards are quantized by Triton's kernels."""
_MOST_CELLS = 1 << 22  # of a batch that keeps maxima in memory


def formats_by_pattern(manifest: Manifest, patterns: Mapping[str, str | None], *, whole: bool = True) -> dict[str, Format]:
    """Return the format of each matrix to quantize, by name. The first pattern (``*``, ``?``, ``[...]``) that matches counts.

    ``None`` leaves what it matches as it is.

    Raises:
        ConfigurationError: A format is unknown, a pattern matches nothing, or what it matches cannot be quantized.
    """
    if not isinstance(patterns, Mapping):
        raise ConfigurationError(f"quantize maps patterns to formats, as {{'*_proj.weight': 'fp8-block'}}, not {patterns!r}")
    used = dict.fromkeys(patterns, False)
    formats: dict[str, Format] = {}
    for spec in manifest:
        pattern = next((each for each in patterns if any(fnmatchcase(name, each) for name in spec.names)), None)
        if pattern is None:
            continue
        used[pattern] = True
        if (name := patterns[pattern]) is not None:
            formats[spec.name] = format_of(name)
            formats[spec.name].check(spec)
    unused = [pattern for pattern, matched in used.items() if not matched]
    if unused and whole:
        raise ConfigurationError(f"no tensor is left for the pattern {unused[0]!r} of quantize: correct it, or leave it out")
    return formats


@dataclass(frozen=True)
class _Cut:
    """Consecutive indices of one dimension of a shard, in ``count`` blocks, whole ones unless it is one; local numbers."""

    start: int
    stop: int
    block: int
    count: int


def _cuts(start: int, stop: int, block: int, most: int) -> list[_Cut]:
    """Cut ``start`` to ``stop`` of a dimension at the borders of its blocks, and where a cut would be longer than ``most``."""
    cuts, at = list[_Cut](), start
    while at < stop:
        whole = (stop - at) // block if at % block == 0 else 0
        count = max(min(whole, most // block), 1)
        end = min(at - at % block + count * block, stop, at + max(most, 1) if count == 1 else stop)
        cuts.append(_Cut(at - start, end - start, at // block - start // block, count))
        at = end
    return cuts


@dataclass(frozen=True, eq=False)
class _QuantizedShard(Shard):
    """Data, scales or other parts of a shard, computed when they are placed; its tensor is on the meta device."""

    source: int = 0
    part: int = 0


@dataclass(eq=False)
class Master:
    """A shard of a matrix that is quantized."""

    matrix: int
    shard: Shard
    blocks: tuple[int, int]
    """Rows and columns of a block."""
    first: tuple[int, int]
    """First block of each dimension that it touches."""
    grid: tuple[int, int]
    """Number of blocks of each dimension that it touches."""
    owned: tuple[slice, slice]
    """Blocks whose first element it holds, numbered from :attr:`first`."""
    kept: dict[int, slice] = field(default_factory=dict)
    """Where its maxima are kept from the exchange on, if some are exchanged: of the blocks (0), of the whole matrix (1)."""

    @property
    def box(self) -> Box:
        """Its place in the matrix."""
        return self.shard.box

    @property
    def tensor(self) -> torch.Tensor:
        """Its contents, as long as the shard has memory."""
        return self.shard.tensor

    @property
    def cells(self) -> int:
        """Number of blocks that it touches."""
        return self.grid[0] * self.grid[1]


class _Matrix:
    """A matrix that is quantized, and the tensors that take its place."""

    def __init__(self, spec: TensorSpec, format_: Format) -> None:
        self.spec, self.format = spec, format_
        self.dtype = torch_dtype(spec.dtype)
        self.shape = (spec.shape[0], spec.shape[1])
        self.blocks, self.grid = format_.blocks(self.shape), format_.grid(self.shape)
        self.specs = format_.specs(spec)
        self.levels = (self.grid, (1, 1)) if format_.uses_whole else (self.grid,)
        """Grids of maxima."""


class _Touched:
    """The blocks of one grid that a shard touches."""

    def __init__(self, box: Box, blocks: tuple[int, int], shape: tuple[int, int], columns: int) -> None:
        self._columns = columns
        self._numbers, self._cut = list[Int64](), list[Bools]()
        for start, stop, block, extent in zip(box.starts, box.stops, blocks, shape, strict=True):
            numbers = np.arange(start // block, -(-stop // block))
            self._numbers.append(numbers)
            self._cut.append((numbers * block < start) | (np.minimum((numbers + 1) * block, extent) > stop))

    @property
    def cut(self) -> bool:
        """Whether the shard holds only a part of one."""
        return bool(self._cut[0].any() or self._cut[1].any())

    def numbers(self, *, all_of_them: bool) -> Int64:
        """Their numbers in the grid, in C order; without ``all_of_them`` of those that the shard holds a part of."""
        numbers: Int64 = self._numbers[0][:, None] * self._columns + self._numbers[1]
        return numbers.ravel() if all_of_them else numbers[self._cut[0][:, None] | self._cut[1]]


class _ShardBatch:
    """Shards of matrices in one format and dtype, encoded by torch, one after the other.

    Cells are the blocks that each shard touches, in C order, shard by shard.
    """

    def __init__(self, numbers: Sequence[int], sources: Sequence[Master], matrix: _Matrix) -> None:
        self.numbers, self.sources, self.matrix = numbers, sources, matrix
        self.device = sources[0].tensor.device
        self.counts = [source.cells for source in sources]
        """Cells of each shard."""
        self.places = _merged([source.kept[0] for source in sources if 0 in source.kept])
        """Where maxima of all cells are kept from the exchange on, if some are exchanged."""
        shared = [number for number, source in enumerate(sources) if 1 in source.kept]
        self.shared = torch.tensor(shared, dtype=torch.int64, device=self.device)
        """Shards whose matrix is exchanged, and where its maximum is kept."""
        self.kept = torch.tensor([sources[number].kept[1].start for number in shared], dtype=torch.int64, device=self.device)
        self._lengths = torch.tensor(self.counts, device=self.device)
        self._outs: Sequence[Mapping[int, torch.Tensor]] = ()

    one_pass = False
    """Whether :meth:`encode` finds the maxima of cells itself."""

    def place(self, outs: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Take up where shards are now, and where data (0), scales (1) and what else they publish (2) go, if anywhere."""
        self._outs = outs

    def maxima(self) -> torch.Tensor:
        """Largest absolute values of the cells, ``float32[cells]``."""
        return torch.cat([self._maxima(source).ravel() for source in self.sources])

    def wholes(self, maxima: torch.Tensor | None) -> torch.Tensor:
        """Largest absolute value of each shard, ``float32[shards]``, of those of its cells if they are known."""
        maxima = self.maxima() if maxima is None else maxima
        return torch.segment_reduce(maxima, "max", lengths=self._lengths, initial=0.0)

    def encode(self, maxima: torch.Tensor | None, wholes: torch.Tensor | None) -> torch.Tensor:
        """Write what the shards publish, with the largest values of cells and of whole matrices, if the format needs them.

        Returns:
            The number of the first shard that is not finite, or that of shards.
        """
        maxima = self.maxima() if maxima is None else maxima
        of_matrices = maxima if wholes is None else wholes
        whole = maxima if wholes is None else wholes.repeat_interleave(self._lengths, output_size=len(maxima))
        encoding, dtype = self.matrix.format, self.matrix.dtype
        scales, factors = encoding.scales(maxima, dtype, whole)
        shares = torch.split(factors, self.counts), torch.split(scales, self.counts)
        more = encoding.more([source.shard.shape for source in self.sources], of_matrices)
        for source, out, of_factors, of_scales, rest in itertools.zip_longest(self.sources, self._outs, *shares, more):
            grid = of_factors.view(source.grid)
            for values, rows, columns in self._views(source):
                part = grid[rows.block : rows.block + rows.count, columns.block : columns.block + columns.count]
                codes = encoding.codes(values, part[:, None, :, None]).flatten(2).flatten(0, 1)
                first, end = columns.start // encoding.packed, columns.stop // encoding.packed
                out[0][rows.start : rows.stop, first:end].copy_(encoding.pack(codes))
            if 1 in out:
                out[1].copy_(of_scales.view(source.grid)[source.owned].reshape(out[1].shape))
            if 2 in out:
                out[2].copy_(rest)
        finite = torch.segment_reduce(maxima.isfinite().float(), "min", lengths=self._lengths, initial=1.0)
        return torch.cat([finite, torch.zeros(1, device=self.device)]).argmin()

    def _maxima(self, source: Master) -> torch.Tensor:
        maxima = torch.zeros(source.grid, device=self.device)
        for values, rows, columns in self._views(source):
            part = maxima[rows.block : rows.block + rows.count, columns.block : columns.block + columns.count]
            torch.maximum(part, torch.linalg.vector_norm(values, torch.inf, dim=(1, 3)).float(), out=part)
        return maxima

    def _views(self, source: Master) -> Iterator[tuple[torch.Tensor, _Cut, _Cut]]:
        """Yield the values of a shard in parts, ``[blocks of rows, rows, blocks of columns, columns]``, in the published dtype."""
        tensor, extent = source.tensor, max(source.box.shape[1], 1)
        most = max(_CHUNK.get(tensor.device.type, _CHUNK_ELSEWHERE) // max(tensor.shape[1], 1), 1)
        for rows in _cuts(source.box.starts[0], source.box.stops[0], source.blocks[0], most):
            for columns in _cuts(source.box.starts[1], source.box.stops[1], source.blocks[1], extent):
                values = tensor[rows.start : rows.stop, columns.start : columns.stop].to(self.matrix.dtype)
                high, wide = values.shape[0] // rows.count, values.shape[1] // columns.count
                yield values.view(rows.count, high, columns.count, wide), rows, columns


class _KernelBatch(DeviceBatch, _ShardBatch):
    """Shards on a GPU, encoded by a launch for all of them."""

    def __init__(self, numbers: Sequence[int], sources: Sequence[Master], matrix: _Matrix) -> None:
        _ShardBatch.__init__(self, numbers, sources, matrix)
        DeviceBatch.__init__(self, matrix.format, sources, matrix.dtype, self.device)
        self.one_pass = matrix.format.block != (0, 0)
        self._whole: DeviceBatch = self
        if matrix.format.uses_whole:
            self._whole = DeviceBatch(matrix.format, sources, matrix.dtype, self.device, whole=True)

    def place(self, outs: Sequence[Mapping[int, torch.Tensor]]) -> None:
        super().place(outs)
        if self.matrix.format.uses_whole:
            self._whole.place(())

    def wholes(self, maxima: torch.Tensor | None) -> torch.Tensor:
        return self._whole.maxima()


class QuantizedShards:
    """The manifest and shards to publish for ``shards``, with the matrices in ``formats`` quantized.

    Args:
        manifest: What would be published without quantizing. Its dtypes count: shards are converted to them before.
        shards: This rank's shards.
        formats: Formats by name.
        all_max: Reaches the other trainer ranks, which make this object at the same time; ``None`` if there are none.

    Raises:
        ConfigurationError: A border between two ranks divides an element that holds several values.
        ManifestMismatch: Another rank has other tensors or formats. Raised on every rank.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        formats: Mapping[str, Format],
        all_max: AllMax | None = None,
    ) -> None:
        self._all_max, self._plain = all_max, manifest
        self._names = list[str]()
        """A matrix of each grid of maxima."""
        self._kept = torch.zeros(0)
        self._known = dict[bool, tuple[object, list[_ShardBatch]]]()
        self._placed = dict[bool, tuple[object, list[int], list[_ShardBatch]]]()
        """Where targets and shards were when batches were placed: those of :meth:`write` (False) and of :meth:`exchange` (True)."""
        self._matrices = [_Matrix(spec, formats[spec.name]) for spec in manifest if spec.name in formats]
        self._index = {matrix.spec.name: number for number, matrix in enumerate(self._matrices)}
        kept = [spec for spec in manifest if spec.name not in self._index]
        self.manifest = Manifest([*kept, *(spec for matrix in self._matrices for spec in matrix.specs)])
        self._sources = [self._source(shard) for shard in shards if shard.name in self._index]
        self._derived = [shard for number in range(len(self._sources)) for shard in self._parts(number)]
        deadline = Deadline(_JOIN_SECONDS)
        self._agree_on_formats(deadline)
        self._agree_on_cut_blocks(deadline)
        self.shards = self.derive(manifest, shards)

    def derive(self, manifest: Manifest, shards: Sequence[Shard]) -> list[Shard]:
        """Take up the shards where they are now, and return those to publish.

        Raises:
            ConfigurationError: They are others than before.
        """
        masters = [shard for shard in shards if shard.name in self._index]
        before = [(self._matrices[source.matrix].spec.name, source.box) for source in self._sources]
        if [(shard.name, shard.box) for shard in masters] != before or manifest != self._plain:
            raise ConfigurationError("this rank holds other tensors or shards than when it was made: make a new weightsync.Trainer")
        for source, master in zip(self._sources, masters, strict=True):
            source.shard = master
        self._placed.clear()
        return ordered(self.manifest, [*(shard for shard in shards if shard.name not in self._index), *self._derived])

    def forget(self) -> None:
        """Keep no tensor alive until :meth:`derive` is called again."""
        for source in self._sources:
            source.shard = replace(source.shard, tensor=torch.empty(0, device="meta"))
        self._placed.clear()
        for _, batches in self._known.values():
            for batch in batches:
                batch._outs = ()

    @property
    def exchanged(self) -> int:
        """Number of maxima that :meth:`exchange` exchanges with other ranks."""
        return 0 if self._all_max is None else self._slots

    # Geometry.

    def _source(self, shard: Shard) -> Master:
        matrix = self._matrices[self._index[shard.name]]
        starts, stops, blocks = shard.box.starts, shard.box.stops, matrix.blocks
        packed = matrix.format.packed
        if starts[1] % packed or stops[1] % packed:
            raise ConfigurationError(
                f"{shard.name} cannot be quantized to {matrix.format.name}: this rank holds its columns {starts[1]} to {stops[1]}, "
                f"and {packed} values share an element. Shard its columns at multiples of {packed}, or its rows"
            )
        first = tuple(start // block for start, block in zip(starts, blocks, strict=True))
        end = tuple(-(-stop // block) for stop, block in zip(stops, blocks, strict=True))
        owned = [
            slice(-(-start // block) - low, high - low) for start, block, low, high in zip(starts, blocks, first, end, strict=True)
        ]
        grid = (end[0] - first[0], end[1] - first[1])
        index, place = self._index[shard.name], (first[0], first[1])
        return Master(index, shard, blocks, place, grid, (owned[0], owned[1]))

    def _parts(self, number: int) -> Iterator[Shard]:
        source = self._sources[number]
        matrix, box = self._matrices[source.matrix], source.box
        packed = matrix.format.packed
        data = Box((box.starts[0], box.starts[1] // packed), (box.stops[0], box.stops[1] // packed))
        boxes = [data]
        if all(part.start < part.stop for part in source.owned):
            starts = tuple(first + part.start for first, part in zip(source.first, source.owned, strict=True))
            stops = tuple(first + part.stop for first, part in zip(source.first, source.owned, strict=True))
            single = matrix.format.block == (0, 0)
            boxes.append(Box.whole((1,)) if single else Box(starts, stops))
            if not any(starts):
                boxes += [Box.whole(spec.shape) for spec in matrix.specs[2:]]
        for part, (spec, held) in enumerate(zip(matrix.specs, boxes, strict=False)):
            tensor = torch.empty(held.shape, dtype=torch_dtype(spec.dtype), device="meta")
            yield _QuantizedShard(spec.name, spec.shape, held, tensor, source=number, part=part)

    def _agree_on_formats(self, deadline: Deadline) -> None:
        """Else ranks would exchange different numbers of maxima, by which gloo ends a process."""
        formats = [(matrix.spec.name, matrix.format.name) for matrix in self._matrices]
        digest = hashlib.blake2b(repr((self.manifest.fingerprint, formats)).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "little")
        numbers = torch.tensor([number, -number])
        self._agree(numbers, deadline)
        if int(numbers.sum()):
            raise ManifestMismatch(
                "this trainer rank publishes other tensors, or in other formats, than another one: give every rank the same model "
                'and quantize=. With "as-served", other engines joined between two ranks: make the trainer again on every rank'
            )

    def _agree_on_cut_blocks(self, deadline: Deadline) -> None:
        """Give each block that several shards share a slot, the same on every rank, and list the slots of this rank's shards."""
        known: dict[tuple[str, str, int], int] = {}
        grids: list[list[int]] = []
        members, extents = list[int](), list[int]()
        for matrix in self._matrices:
            of_matrix = list[int]()
            for level, extent in enumerate(matrix.levels):
                fused = matrix.format.fuses and level == len(matrix.levels) - 1
                name = _MEMBER.sub(_fused_name, matrix.spec.name) if fused else matrix.spec.name
                of_matrix.append(known.setdefault((name, matrix.format.name, level), len(known)))
                if of_matrix[-1] == len(members):
                    members.append(0)
                    extents.append(extent[0] * extent[1])
                    self._names.append(matrix.spec.name)
                members[of_matrix[-1]] += 1
            grids.append(of_matrix)
        shared = torch.tensor([count > 1 for count in members], dtype=torch.uint8)
        fused_grids = shared.numpy().astype(bool)
        touched = [
            (level, source, grid, cells)
            for source in self._sources
            for level, (grid, cells) in enumerate(zip(grids[source.matrix], self._touched(source), strict=True))
        ]
        for _, _, grid, cells in touched:
            shared[grid] |= int(cells.cut)
        self._agree(shared, deadline)
        sizes = np.array(extents, np.int64) * shared.numpy()
        bases = np.cumsum(sizes) - sizes
        mask = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
        for _, _, grid, cells in touched:
            if sizes[grid]:
                mask[torch.from_numpy(bases[grid] + cells.numbers(all_of_them=bool(fused_grids[grid])))] = 1
        self._agree(mask, deadline)
        chosen = mask.numpy().astype(bool)
        slots = np.cumsum(chosen) - 1
        self._slots = int(chosen.sum())
        self._slot_names = np.repeat(np.arange(len(sizes)), sizes)[chosen]
        positions, used = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        self._kept_size = 0
        for level, source, grid, cells in sorted(touched, key=itemgetter(0)):  # so that those of a batch follow one another
            blocks = bases[grid] + cells.numbers(all_of_them=True) if sizes[grid] else np.zeros(0, np.int64)
            exchanged = np.flatnonzero(chosen[blocks])
            if len(exchanged):
                source.kept[level] = slice(self._kept_size, self._kept_size + blocks.size)
                positions.append(self._kept_size + exchanged)
                used.append(slots[blocks[exchanged]])
                self._kept_size += blocks.size
        self._positions, self._used = torch.from_numpy(np.concatenate(positions)), torch.from_numpy(np.concatenate(used))

    def _agree(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        if self._all_max is not None and tensor.numel():
            self._all_max(tensor, deadline)

    def _touched(self, source: Master) -> list[_Touched]:
        """The blocks of each grid of its matrix that this shard touches."""
        matrix, box = self._matrices[source.matrix], source.box
        return [
            _Touched(box, blocks, matrix.shape, extent[1])
            for blocks, extent in zip((matrix.blocks, matrix.shape), matrix.levels, strict=False)
        ]

    # Contents.

    @torch.no_grad()
    def exchange(self, deadline: Deadline) -> None:
        """Take the maxima of blocks that several shards share. The shards must not change from here until :meth:`write` returned.

        Raises:
            WeightSyncError: Of the exchange between ranks.
            ConfigurationError: Such a block holds Inf or NaN; on every rank.
        """
        if not self._slots:
            return
        values = torch.zeros(self._slots)
        if self._sources:
            device = self._sources[0].tensor.device
            self._kept = torch.zeros(self._kept_size, device=device)
            for batch in self._ready(None):
                maxima = batch.maxima() if batch.places or not batch.one_pass else None
                if maxima is not None and batch.places:
                    sizes = [place.stop - place.start for place in batch.places]
                    for place, part in zip(batch.places, torch.split(maxima, sizes), strict=True):
                        self._kept[place] = part
                if batch.matrix.format.uses_whole:
                    self._kept[batch.kept.to(device)] = batch.wholes(maxima)[batch.shared].to(device)
            self._positions, self._used = self._positions.to(device), self._used.to(device)
            mine = self._kept[self._positions]
            mine = torch.where(mine.isfinite(), mine, torch.inf)
            values = values.to(device).scatter_reduce_(0, self._used, mine, "amax").cpu()
        self._agree(values, deadline)
        bad = torch.nonzero(values.isinf())
        if len(bad):
            raise not_finite(self._names[int(self._slot_names[int(bad[0])])])
        if self._sources:
            self._kept[self._positions] = values.to(device)[self._used]

    @torch.no_grad()
    def write(self, targets: Iterable[tuple[Shard, torch.Tensor]], stop: Int8) -> None:
        """Fill the memory of shards of :attr:`shards` that have none, after :meth:`exchange`.

        Raises:
            Aborted: Another thread set ``stop[0]``.
            ConfigurationError: A matrix holds Inf or NaN.
        """
        batches = self._ready(targets if isinstance(targets, tuple) else tuple(targets))
        bad = list[torch.Tensor]()
        for batch in batches:
            if stop[0]:
                raise Aborted("the copy of this version was stopped")
            bad.append(self._write(batch))
        for batch, number in zip(batches, map(int, bad), strict=True):
            if number < len(batch.sources):
                raise not_finite(self._matrices[batch.sources[number].matrix].spec.name)

    def _ready(self, targets: tuple[tuple[Shard, torch.Tensor], ...] | None) -> list[_ShardBatch]:
        """Batches that fill ``targets``, or with ``None`` those whose maxima are exchanged; as before if all is where it was."""
        addresses = [source.shard.tensor.data_ptr() for source in self._sources]
        known = self._placed.get(targets is None)
        if known is not None and known[0] is targets and known[1] == addresses:
            return known[2]
        parts: dict[int, dict[int, torch.Tensor]] = {}
        for shard, target in targets or ():
            if isinstance(shard, _QuantizedShard):
                parts.setdefault(shard.source, {})[shard.part] = target
        if targets is None:
            batches = self._batches([number for number, source in enumerate(self._sources) if source.kept], None)
        else:
            batches = self._batches(list(parts), next(iter(parts.values()))[0].device) if parts else []
        for batch in batches:
            batch.place([parts[number] for number in batch.numbers] if parts else ())
        self._placed[targets is None] = targets, addresses, batches
        return batches

    def _batches(self, numbers: Sequence[int], target: torch.device | None) -> list[_ShardBatch]:
        """Sort shards into batches, which are kept for the next call. What is quantized goes to memory of ``target``, if given."""
        tensors = [self._sources[number].tensor for number in numbers]
        key = (target, numbers, [(tensor.device, tensor.dtype, tensor.stride(1) == 1) for tensor in tensors])
        known = self._known.get(target is None)
        if known is not None and known[0] == key:
            return known[1]
        sorted_ = dict[tuple[bool, Format, torch.dtype, torch.device, torch.dtype, bool], list[int]]()
        for number, tensor in zip(numbers, tensors, strict=True):
            source = self._sources[number]
            matrix = self._matrices[source.matrix]
            by_kernels = tensor.device.type in KERNELS_ON and target in (None, tensor.device) and tensor.stride(1) == 1
            kind = (by_kernels and source.box.size > 0, matrix.format, matrix.dtype, tensor.device, tensor.dtype, 0 in source.kept)
            sorted_.setdefault(kind, []).append(number)
        batches = list[_ShardBatch]()
        for kind, of_kind in sorted_.items():
            ends = np.cumsum([self._sources[number].cells for number in of_kind])
            first = 0
            while first < len(of_kind):
                before = ends[first - 1] if first else 0
                most = _MOST_CELLS if not kind[0] or kind[-1] else ends[-1]
                last = max(int(np.searchsorted(ends, before + most, side="right")), first + 1)
                sources = [self._sources[number] for number in of_kind[first:last]]
                made = _KernelBatch if kind[0] else _ShardBatch
                batches.append(made(of_kind[first:last], sources, self._matrices[sources[0].matrix]))
                first = last
        self._known[target is None] = key, batches
        return batches

    def _write(self, batch: _ShardBatch) -> torch.Tensor:
        """Quantize shards. Return the number of one that is not finite, or that of shards."""
        maxima = wholes = None
        if batch.places:
            maxima = torch.cat([self._kept[place] for place in batch.places]).to(batch.device)
        elif not batch.one_pass:
            maxima = batch.maxima()
        if batch.matrix.format.uses_whole:
            wholes = known = self._kept[batch.kept.to(self._kept.device)].to(batch.device)
            if len(known) < len(batch.sources):
                wholes = batch.wholes(maxima)
                wholes[batch.shared] = known
        return batch.encode(maxima, wholes)


def fused_group(name: str) -> tuple[str, int]:
    """Return the name that matrices which engines fuse have in common with the one called ``name``, and their number."""
    member = _MEMBER.search(name)
    count = 1 if member is None else next(len(group) for group in _FUSED if member[0] in group)
    return _MEMBER.sub(_fused_name, name), count


def _merged(places: Sequence[slice]) -> Sequence[slice]:
    """The slice that consists of these, if each follows the one before; otherwise these."""
    adjacent = all(place.stop == after.start for place, after in itertools.pairwise(places))
    return [slice(places[0].start, places[-1].stop)] if places and adjacent else places


def _fused_name(member: re.Match[str]) -> str:
    """The name of the first of the matrices that engines fuse with this one."""
    return next(group[0] for group in _FUSED if member[0] in group)


def not_finite(name: str) -> ConfigurationError:
    """Return the error that a matrix holds Inf or NaN."""
    return ConfigurationError(
        f"{name} holds Inf or NaN and cannot be quantized: no version was published, and replicas serve the last one. The training "
        "step before diverged"
    )
