"""The numbers of ``figures.toml``: rates measured here, traits of transports, published updates; calibrated on the odd rows."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from weightsync_bench.forecast.mesh import Mesh, ShapeTable, Traffic, traffic_between
from weightsync_bench.shapes import read_configuration, tensor_counts

_Positive = Annotated[float, Meta(gt=0)]
Scheme = Literal["sharded", "gathered", "broadcast", "direct", "operations"]
"""``sharded`` readers pull what they need from ranks that hold it. ``gathered`` systems make whole tensors first and send parts.
``broadcast`` systems send everything to everybody. ``direct`` is one-sided over NVLink, ``operations`` a list of descriptors."""

GIGABIT = 1e9 / 8
_HOST_GPUS = 8
_STRIDED_RUN = 1024  # bytes; a GPU reads shorter runs of a peer more slowly


class SourcedValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure, and where it is from."""

    value: _Positive
    source: str


class TransportLinks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a transport uses links."""

    name: str
    reach: Literal["process", "host", "network"]
    memory: Literal["cuda", "host"]
    shared: bool = False
    """Replicas share a broadcast, so the trainer sends to one of them."""
    buffers: int = 0
    """Bytes of staging in GPU memory at both ends."""
    core: str = ""
    """The figure of a processor core's rate, if one copies."""


class PublishedRefit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of ``[[published]]``."""

    number: int
    what: str
    citation: str
    left_out: str = ""
    scheme: Scheme = "sharded"
    model: str = ""
    dtype: str = "bfloat16"
    tensors: int = 0
    """Number of tensors, if there is no ``model``."""
    received: float = 0.0
    """Bytes of an engine GPU, if the source says so."""
    operations: int = 0
    source: str = "tp=1"
    target: str = "tp=1"
    nic: float = 0.0
    """Gb/s a GPU; 0 if the bytes stay on one host."""
    nvlink: float = 0.0
    seconds: tuple[_Positive, _Positive] = (1.0, 1.0)
    """Shortest and longest that was published."""
    assumed: str = ""

    @property
    def typical(self) -> float:
        """Geometric mean of the published seconds."""
        return float(np.sqrt(self.seconds[0] * self.seconds[1]))


class MeasuredRound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of ``[[round]]``: a round of this project, beside which a forecast is tested."""

    model: str
    source: str
    target: str
    placement: Literal["shared", "colocated"]
    transport: str
    read: _Positive
    """Seconds of the transfer alone."""
    pause: _Positive
    """Seconds from pause to resume."""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of the file."""

    measured: dict[str, SourcedValue]
    transport: tuple[TransportLinks, ...]
    published: tuple[PublishedRefit, ...]
    round: tuple[MeasuredRound, ...]

    def __getitem__(self, name: str) -> float:
        return self.measured[name].value


class Calibration(msgspec.Struct, frozen=True):
    """Seconds of a transfer: ``factor`` times the floor of the busiest link, and ``tensor`` for each tensor of the model."""

    factor: float
    tensor: float
    rows: int = 0
    spread: float = 1.0
    """Geometric standard deviation of published over predicted seconds, over all rows of the scheme, calibrating or not."""

    def seconds(self, floor: float, tensors: int) -> float:
        """Predict."""
        return self.factor * floor + self.tensor * tensors


class Prediction(msgspec.Struct, frozen=True):
    """A published row beside the forecast."""

    row: PublishedRefit
    floor: float
    seconds: float

    @property
    def calibrates(self) -> bool:
        """Whether the row's number is odd."""
        return self.row.number % 2 == 1

    @property
    def error(self) -> float:
        """Predicted over published seconds, less one."""
        return self.seconds / self.row.typical - 1


@cache
def figures() -> Figures:
    """Read the file."""
    text = files("weightsync_bench.forecast").joinpath("figures.toml").read_bytes()
    return msgspec.toml.decode(text, type=Figures)


@cache
def calibration_of(scheme: Scheme) -> Calibration:
    """Fit the scheme's odd rows by least squares of the relative error. The factor is at least 1, a tensor's time at least 0."""
    rows = [row for row in figures().published if row.scheme == scheme and not row.left_out]
    points = [(*_floor_and_tensors(row), row.typical) for row in rows]
    odd = [point for row, point in zip(rows, points, strict=True) if row.number % 2]
    fit = Calibration(*_fit(odd)) if odd else Calibration(1.0, 0.0)
    ratios = np.log([published / fit.seconds(floor, tensors) for floor, tensors, published in points])
    return Calibration(fit.factor, fit.tensor, len(odd), float(np.exp(np.sqrt((ratios**2).mean()))))


def predictions() -> list[Prediction]:
    """Return every row that is not left out, with its forecast."""
    rows = [row for row in figures().published if not row.left_out]
    floors = [_floor_and_tensors(row) for row in rows]
    return [
        Prediction(row, floor, calibration_of(row.scheme).seconds(floor, tensors))
        for row, (floor, tensors) in zip(rows, floors, strict=True)
    ]


def gathering_rate(traffic: Traffic) -> float:
    """Return the rate at which a GPU reads a peer's runs of different lengths, as a share of the link's."""
    return 1 / (1 + (1 / figures()["strided_rate"] - 1) * traffic.shorter(_STRIDED_RUN))


def _fit(points: list[tuple[float, int, float]]) -> tuple[float, float]:
    floors, tensors = (np.array([point[index] / point[2] for point in points]) for index in (0, 1))
    if len(points) > 1:
        factor, tensor = np.linalg.lstsq(np.stack([floors, tensors], axis=1), np.ones(len(points)), rcond=None)[0].tolist()
        if factor >= 1 and tensor >= 0:
            return factor, tensor
        if factor < 1:
            return 1.0, max(float((tensors * (1 - floors)).sum() / (tensors**2).sum()), 0.0)
    return max(float(floors.sum() / (floors**2).sum()), 1.0), 0.0


@cache
def _shapes_of(model: str, dtype: str) -> ShapeTable:
    return ShapeTable(tensor_counts(read_configuration(model), dtype))


def _floor_and_tensors(row: PublishedRefit) -> tuple[float, int]:
    """Return the seconds that the busiest link needs at its rate, and the number of tensors."""
    source, target = Mesh.parse(row.source), Mesh.parse(row.target)
    rate = row.nvlink or row.nic * GIGABIT
    if row.scheme == "operations":
        return max(row.received / rate, row.operations * figures()["operation"]), row.operations
    if not row.model:
        return row.received * max(1.0, target.ranks / source.ranks) / rate, row.tensors
    shapes = _shapes_of(row.model, row.dtype)
    if row.scheme == "broadcast":  # every host receives everything through all of its NICs
        return shapes.nbytes / rate / min(_HOST_GPUS, source.ranks, target.ranks), len(shapes)
    traffic = traffic_between(shapes, source, target)
    received = row.received or traffic.received
    if row.nvlink:
        rate *= gathering_rate(traffic)
    return received * max(1.0, target.ranks / source.ranks) / rate, len(shapes)
