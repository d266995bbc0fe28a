"""Meshes of trainers and engines, and what one rank of a mesh receives from ranks of another: bytes, pieces, contiguous runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigurationError
from weightsync.model import Manifest, TensorSpec
from weightsync_bench.sharding import expert_numbers, parallel_dims

Int64 = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_RANKS = 1 << 20


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of one side share the model. ``replicas`` are whole copies: serving replicas, or data parallel trainer groups.

    A pipeline stage has ``max(fsdp * tp, ep)`` ranks. Where ``ep`` is more than 1, experts are in blocks by rank, and cut only by
    rows if ``fsdp`` is larger. Where it is 1, they are cut like other tensors.
    """

    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if min(msgspec.structs.astuple(self)) < 1 or self.ranks > _MOST_RANKS:
            raise ConfigurationError(f"{self}: sizes must be at least 1, and the ranks at most {_MOST_RANKS:,}")
        if self.stage % self.ep or self.stage % (self.fsdp * self.tp):
            raise ConfigurationError(f"ep={self.ep} and fsdp x tp={self.fsdp * self.tp}: one must divide the other")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse ``tp=16,replicas=16``; ``dp`` is another name of ``replicas``.

        Raises:
            ConfigurationError: The text has another form, or a size is invalid.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            name = "replicas" if name == "dp" else name
            if name not in cls.__struct_fields__ or name in sizes or not (number.isascii() and number.isdecimal()):
                raise ConfigurationError(f"give a mesh as tp=16,replicas=16, of fsdp, tp, pp, ep, replicas, not {text!r}")
            sizes[name] = int(number[:9])
        return cls(**sizes)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in self.__struct_fields__}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "tp=1"

    @property
    def stage(self) -> int:
        """Ranks of a pipeline stage."""
        return max(self.fsdp * self.tp, self.ep)

    @property
    def each(self) -> int:
        """Ranks of one copy of the model."""
        return self.stage * self.pp

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.each * self.replicas


class ShapeTable:
    """The tensors of a model as arrays, a row for tensors that are alike."""

    def __init__(self, counted: Sequence[tuple[TensorSpec, int]]) -> None:
        counts = {spec.name: count for spec, count in counted}
        manifest = Manifest([spec for spec, _ in counted])
        dimensions = np.array([len(spec.shape) for spec in manifest])
        self.count = np.array([counts[spec.name] for spec in manifest], np.int64)
        self.bytes_of = np.array([spec.nbytes for spec in manifest], np.float64)
        """Bytes of one such tensor."""
        self.nbytes = int((self.bytes_of * self.count).sum())
        self.itemsizes = manifest.itemsizes.astype(np.float64)
        self.first = manifest.shapes[np.arange(len(manifest)), manifest.dims - dimensions]
        self.last = np.where(dimensions > 1, manifest.shapes[:, -1], 1)
        dims = parallel_dims(manifest)
        self.row_parallel = (dims == manifest.dims - 1) & (dimensions > 1)
        self.column_parallel = (dims >= 0) & ~self.row_parallel
        self.expert = expert_numbers(manifest) >= 0

    def __len__(self) -> int:
        """Number of tensors."""
        return int(self.count.sum())

    @cached_property
    def mixture(self) -> bool:
        """Whether there are experts."""
        return bool(self.expert.any())

    def parts(self, mesh: Mesh) -> tuple[Int64, Int64, Floats]:
        """Return in how many parts each tensor is cut by rows and by columns, and the share of a copy's ranks that hold any part.

        The share counts ranks with different parts once, so a rank's bytes are ``bytes / rows / columns * share``.
        """
        whole = self.expert & (mesh.ep > 1)
        rows = np.where(self.column_parallel & ~whole, mesh.tp, 1) * np.where(whole, 1, mesh.fsdp)
        if mesh.fsdp > 1:
            rows = np.where(whole, mesh.stage // mesh.ep, rows)
        columns = np.where(self.row_parallel & ~whole, mesh.tp, 1)
        share = np.where(whole, 1 / mesh.ep, 1.0) / mesh.pp
        return _chunks(self.first, rows), _chunks(self.last, columns), share

    def held(self, mesh: Mesh) -> float:
        """Return the bytes of a rank, on average over pipeline stages."""
        rows, columns, share = self.parts(mesh)
        return float((self.count * self.bytes_of / rows / columns * share).sum())


def _chunks(extent: Int64, parts: Int64) -> Int64:
    """Return the number of parts that :func:`torch.chunk` makes."""
    return -(-extent // -(-extent // parts))


@dataclass(frozen=True, eq=False)
class Traffic:
    """What a rank of the target receives in a round, and what that asks of a rank of the source."""

    received: float
    """Bytes of a target rank."""
    sent: float
    """Bytes of a source rank, if it serves every target rank on its own. The planner balances sources that hold the same."""
    owned: float
    """Bytes that a source rank holds."""
    pieces: int
    """Boxes that a target rank reads."""
    replica_pieces: int
    """The same of all ranks of a replica: what one plan has."""
    runs: Floats
    """Bytes of the contiguous runs of each tensor's pieces, ascending."""
    bytes_of_runs: Floats
    """Bytes that a target rank receives in such runs."""
    aligned: float
    """Share of the received bytes that the source rank of the same number holds, where both sides are cut alike."""

    def shorter(self, nbytes: float) -> float:
        """Return the share of the received bytes in runs of less than ``nbytes``."""
        return float(self.bytes_of_runs[: np.searchsorted(self.runs, nbytes)].sum()) / self.received

    @property
    def median_run(self) -> float:
        """Half of the bytes are in runs that are not longer."""
        return float(self.runs[np.searchsorted(np.cumsum(self.bytes_of_runs), self.received / 2)])


def traffic_between(shapes: ShapeTable, source: Mesh, target: Mesh) -> Traffic:
    """Compute what crosses between two meshes."""
    source_rows, source_columns, _ = shapes.parts(source)
    rows, columns, share = shapes.parts(target)
    received = shapes.count * shapes.bytes_of / rows / columns * share
    pieces = float((shapes.count * -(-source_rows // rows) * -(-source_columns // columns) * share).sum())
    cuts = np.maximum(source_columns, columns)
    runs = np.where(cuts > 1, shapes.last / cuts * shapes.itemsizes, shapes.bytes_of / np.maximum(source_rows, rows))
    order = np.argsort(runs, kind="stable")
    total = float(received.sum())
    alike = (source_rows == rows) & (source_columns == columns) & (~shapes.expert | (source.ep == target.ep))
    aligned = float(received[alike].sum()) / total if (source.each, source.pp) == (target.each, target.pp) else 0.0
    return Traffic(
        received=total, sent=total * target.ranks / source.ranks, owned=shapes.held(source), pieces=round(pieces),
        replica_pieces=round(pieces * target.each), runs=runs[order], bytes_of_runs=received[order],
        aligned=aligned,
    )  # fmt: skip
