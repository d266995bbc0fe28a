"""The forecast of an update: for each transport the links that bytes cross, the stages of a round, and memory; then what to change.

A transfer takes as long as its busiest link. On one host the factor over that floor is measured (``direct``). Between hosts this
project has measured nothing, so what other sharded systems published is taken (:func:`~.figures.calibration_of`), beside the floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from weightsync.errors import ConfigurationError
from weightsync.planning.limits import MOST_PIECES
from weightsync_bench.forecast.figures import GIGABIT, TransportLinks, calibration_of, figures, gathering_rate
from weightsync_bench.forecast.mesh import Mesh, ShapeTable, Traffic, traffic_between
from weightsync_bench.shapes import check_heads, tensor_counts

Placement = Literal["separate", "shared", "colocated"]

_LEAST_DIRECT_RUN, _MOST_DIRECT_RUN = 16 << 10, 16 << 20  # between which nixl chooses where direct reads begin
_SEGMENT = 2 << 20  # torch's smallest segment: what is mapped at once
_TILE, _ENGINE_TILE, _TRAINER_TILE = 64 << 10, 68, 36  # bytes of a tile, and of its row in the tables at both ends
_PIECE = 68  # bytes of a piece of two dimensions at the coordinator
_WORTH, _LONG_METADATA = 0.95, 10.0  # a change is worth it from this share of the pause, or so many seconds of metadata
_MOST_EP = 64
_STAGING = 1244 << 20  # of a streamed engine rank: two buffers of 622 MB


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """An update to forecast. Rates are those of one GPU, in one direction."""

    model: Mapping[str, Any]
    """A ``config.json``, decoded."""
    source: Mesh
    target: Mesh
    dtype: str = "bfloat16"
    nic: float = 400.0
    """Gb/s."""
    nvlink: float = 396.0
    """GB/s."""
    host_gpus: int = 8
    placement: Placement = "separate"
    """Engines on hosts of their own, on other GPUs of the trainer's hosts, or on the trainer's GPUs."""

    def __post_init__(self) -> None:
        if not (0 < self.nic < math.inf and 0 < self.nvlink < math.inf and self.host_gpus > 0):
            raise ConfigurationError("rates and the number of GPUs a host are more than 0")


class Link(msgspec.Struct, frozen=True):
    """A link of the busiest rank of its kind, in one round."""

    name: str
    nbytes: float
    rate: float

    @property
    def seconds(self) -> float:
        """At the link's rate."""
        return self.nbytes / self.rate


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """One transport."""

    transport: str
    unusable: str = ""
    """Why it cannot do it; then there is nothing else."""
    links: tuple[Link, ...] = ()
    stages: dict[str, float] = {}
    """Seconds, in order: ``metadata`` is once for each set of ranks, while training goes on; ``place`` is before the pause."""
    basis: str = ""
    """What the transfer's seconds are taken from."""
    spread: float = 1.0
    """The factor by which published systems scatter around such a forecast."""
    memory: dict[str, float] = {}
    """Extra bytes: of a trainer rank, of an engine rank, of the coordinator."""

    @property
    def bottleneck(self) -> Link:
        """The link that takes longest."""
        return max(self.links, key=lambda link: link.seconds)

    @property
    def metadata(self) -> float:
        """Seconds of the stage of that name."""
        return self.stages["metadata"]

    @property
    def pause(self) -> float:
        """Seconds from pause to resume."""
        return sum(seconds for name, seconds in self.stages.items() if name not in ("metadata", "place"))


class Change(msgspec.Struct, frozen=True):
    """A change of the scenario, and what the best transport would take then."""

    what: str
    transport: str
    metadata: float
    pause: float


class Refit(msgspec.Struct, frozen=True, kw_only=True):
    """The quantities that do not depend on the transport."""

    tensors: int
    nbytes: int
    received: float
    sent: float
    pieces: int
    plan_pieces: int
    run: float
    trainer_hosts: int
    engine_hosts: int


class RefitForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of one update: its plan, and the seconds on each transport."""

    refit: Refit
    refused: str
    """Why the coordinator would refuse the plan; empty if it would not."""
    transports: tuple[Forecast, ...]
    best: str
    """The transport with the shortest pause; empty if none can do it."""
    changes: tuple[Change, ...]
    """The most effective first."""
    others: dict[str, float]
    """Seconds that published systems of other schemes would take."""


def forecast_refit(scenario: Scenario) -> RefitForecast:
    """Forecast an update by every transport, and what changes of the scenario would bring.

    Raises:
        ConfigurationError: Engines refuse the target mesh for this model.
    """
    check_heads(scenario.model, scenario.target.tp)
    shapes = ShapeTable(tensor_counts(scenario.model, scenario.dtype))
    traffic = traffic_between(shapes, scenario.source, scenario.target)
    transports, best, refused = _best(scenario, shapes, traffic)
    nic = scenario.nic * GIGABIT
    busiest = max(traffic.received, traffic.sent) / nic
    everything = shapes.nbytes / nic / min(scenario.host_gpus, scenario.source.ranks, scenario.target.ranks)
    return RefitForecast(
        refit=Refit(
            tensors=len(shapes), nbytes=shapes.nbytes, received=traffic.received, sent=traffic.sent, pieces=traffic.pieces,
            plan_pieces=traffic.replica_pieces, run=traffic.median_run,
            trainer_hosts=-(-scenario.source.ranks // scenario.host_gpus),
            engine_hosts=-(-scenario.target.ranks // scenario.host_gpus),
        ),
        refused=refused, transports=transports, best=best.transport if best else "", changes=_changes(scenario, best, refused),
        others={
            "gathered": calibration_of("gathered").seconds(busiest, len(shapes)),
            "broadcast": calibration_of("broadcast").seconds(everything, len(shapes)),
        } if scenario.placement == "separate" else {},
    )  # fmt: skip


def _best(scenario: Scenario, shapes: ShapeTable, traffic: Traffic) -> tuple[tuple[Forecast, ...], Forecast | None, str]:
    transports = tuple(_forecast(scenario, shapes, traffic, links) for links in figures().transport)
    usable = [forecast for forecast in transports if not forecast.unusable]
    refused = ""
    if traffic.replica_pieces > MOST_PIECES:
        refused = f"the coordinator refuses a plan of {traffic.replica_pieces:,} pieces: at most {MOST_PIECES:,} for a replica"
    return transports, min(usable, key=lambda forecast: round(forecast.pause, 3), default=None), refused


def _forecast(scenario: Scenario, shapes: ShapeTable, traffic: Traffic, transport: TransportLinks) -> Forecast:
    measured = figures()
    own, near, far = _shares(scenario, traffic)
    if transport.reach == "process":
        return Forecast(transport=transport.name, unusable="trainer and engines are separate processes")
    if transport.reach == "host" and far > 0:
        return Forecast(transport=transport.name, unusable="bytes cross hosts")
    links = tuple(_links(scenario, traffic, transport, (own, near, far)))
    floor = max(link.seconds for link in links)
    seconds, basis, spread = floor, "this machine's rates", 1.0
    if transport.memory == "cuda" and far > 0:
        fit = calibration_of("sharded")
        seconds, basis, spread = fit.seconds(floor, len(shapes)), "published sharded systems", fit.spread
    elif transport.memory == "cuda":
        factor = measured["packed_factor"] if transport.shared else calibration_of("direct").factor
        seconds, basis = floor * factor, "measured on one host"
    on_gpu = transport.memory == "cuda"
    placing = traffic.owned / (measured["gpu_digest"] if on_gpu else measured["pcie"])
    stages = {
        "metadata": _metadata(scenario, shapes, traffic, transport),
        "place": placing + len(shapes) * measured["place_tensor"],
        "control": scenario.target.ranks * measured["control_rank"],
        "transfer": seconds,
        "digest": traffic.received / measured["gpu_digest"] if on_gpu else 0.0,
        "resume": measured["pause"],
    }
    return Forecast(
        transport=transport.name, links=links, stages=stages, basis=basis, spread=spread,
        memory=_memory(scenario, traffic, transport),
    )  # fmt: skip


def _shares(scenario: Scenario, traffic: Traffic) -> tuple[float, float, float]:
    """Return which shares of an engine rank's bytes lie on its own GPU, on its host, and on other hosts."""
    if scenario.placement == "separate":
        return 0.0, 0.0, 1.0
    trainers, copies = scenario.source.ranks, scenario.source.replicas
    on_host = min(1.0, min(scenario.host_gpus, trainers) * copies / trainers)
    if scenario.placement == "shared":
        return 0.0, on_host, 1.0 - on_host
    own, elsewhere = copies / trainers, 1.0 - traffic.aligned
    return traffic.aligned + elsewhere * own, elsewhere * (on_host - own), elsewhere * (1.0 - on_host)


def _links(scenario: Scenario, traffic: Traffic, transport: TransportLinks, shares: tuple[float, float, float]) -> Iterator[Link]:
    measured = figures()
    own, near, far = shares
    nic, nvlink = scenario.nic * GIGABIT, scenario.nvlink * 1e9
    received, sent = traffic.received, traffic.sent / (scenario.target.replicas if transport.shared else 1)
    if transport.memory == "host":
        yield Link("engine rank: one core copies", received, measured[transport.core])
        yield Link("engine GPU: PCIe in", received, measured["pcie"])
    if far:
        yield Link("trainer GPU: NIC out", far * sent, nic)
        yield Link("engine GPU: NIC in", far * received, nic)
    if transport.memory == "host":
        return
    if near:
        rate = nvlink if transport.shared else nvlink * gathering_rate(traffic)
        yield Link("trainer GPU: NVLink out", near * sent, rate)
        yield Link("engine GPU: NVLink in", near * received, rate)
    if own:
        yield Link("engine GPU: own memory", own * received, measured["gpu_copy"])
    packed = 1.0 if transport.shared else 0.0
    if transport.name == "nixl":
        rate = nic if far else nvlink
        direct = min(max(4 * measured["operation"] * rate, _LEAST_DIRECT_RUN), _MOST_DIRECT_RUN)
        packed = traffic.shorter(direct)
        yield Link("engine GPU: READs posted", (1 - packed) * traffic.pieces, 1 / measured["operation"])
    if packed:
        yield Link("trainer GPU: packing", packed * traffic.sent, measured["gpu_copy"] * measured["strided_rate"])


def _metadata(scenario: Scenario, shapes: ShapeTable, traffic: Traffic, transport: TransportLinks) -> float:
    """Return the seconds of plans of all replicas, one after the other, and of what a rank prepares once."""
    measured = figures()
    seconds = traffic.replica_pieces * scenario.target.replicas * measured["plan_piece"]
    sources = -(-scenario.source.each // scenario.target.pp)
    if transport.name == "cuda_ipc":
        seconds += min(traffic.pieces, shapes.nbytes / _SEGMENT) * measured["map_handle"]
    elif transport.name == "nixl":
        seconds += measured["register"]
    elif transport.shared:
        seconds += sources * measured["communicator"]
    return seconds + (measured["compile"] if transport.memory == "cuda" else 0.0)


def _memory(scenario: Scenario, traffic: Traffic, transport: TransportLinks) -> dict[str, float]:
    coordinator = float(traffic.replica_pieces * scenario.target.replicas * _PIECE)
    if transport.memory == "host":
        return {"trainer rank (host)": traffic.owned, "engine rank": float(_STAGING), "coordinator": coordinator}
    table = max(traffic.received / _TILE, traffic.pieces) * _ENGINE_TILE
    return {
        "trainer rank": traffic.owned / _TILE * _TRAINER_TILE + transport.buffers, "engine rank": table + transport.buffers,
        "coordinator": coordinator,
    }  # fmt: skip


def _changes(scenario: Scenario, best: Forecast | None, refused: str) -> tuple[Change, ...]:
    """Try changes, one at a time, and return those that help, the most effective first."""
    changes = []
    for what, changed in _alternatives(scenario):
        shapes = ShapeTable(tensor_counts(changed.model, changed.dtype))
        traffic = traffic_between(shapes, changed.source, changed.target)
        _, forecast, still_refused = _best(changed, shapes, traffic)
        if forecast is None or still_refused:
            continue
        shorter = best is None or forecast.pause < _WORTH * best.pause
        simpler = best is not None and forecast.metadata < min(_WORTH * best.metadata, best.metadata - _LONG_METADATA)
        if refused or shorter or simpler:
            changes.append(Change(what, forecast.transport, forecast.metadata, forecast.pause))
    return tuple(sorted(changes, key=lambda change: (round(change.pause, 3), change.metadata)))


def _alternatives(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    replace = msgspec.structs.replace
    source, target = scenario.source, scenario.target
    if scenario.dtype in ("bfloat16", "float16"):
        yield "publish float8_e4m3fn: half of the bytes", replace(scenario, dtype="float8_e4m3fn")
    experts = ShapeTable(tensor_counts(scenario.model, scenario.dtype)).mixture
    if experts and target.ep == 1 and target.tp > 1:
        whole = replace(target, ep=target.tp)
        yield f"whole experts at engines, {whole}: fewer and longer pieces", replace(scenario, target=whole)
    if experts and source.ep == 1 and (size := math.gcd(source.fsdp, _MOST_EP)) > 1:
        whole = replace(source, ep=size)
        yield f"whole experts at the trainer, {whole}: fewer and longer pieces", replace(scenario, source=whole)
    if scenario.placement == "separate":
        yield f"NICs of {2 * scenario.nic:g} Gb/s", replace(scenario, nic=2 * scenario.nic)
    if source.ranks < target.ranks and scenario.placement == "separate":
        yield (
            f"twice as many trainer GPUs that hold weights, dp={2 * source.replicas}",
            replace(scenario, source=replace(source, replicas=2 * source.replicas)),
        )
    yield f"NVLink of {2 * scenario.nvlink:g} GB/s", replace(scenario, nvlink=2 * scenario.nvlink)
