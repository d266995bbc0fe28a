"""Suite ``gpu`` of ``weightsync bench``: whole rounds between GPUs, with the floor of the same run.

Cases use the public interface: a coordinator, and a process with a ``Trainer`` or ``Engine`` for each rank. Every round publishes
new random weights. A case fails if the installed digests of any rank differ from the published ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from weightsync.config import ServerSettings
from weightsync.errors import RoundFailed
from weightsync.server.server import BackgroundServer
from weightsync_bench.gpu_job import Job, manifest_for
from weightsync_bench.peer import Peer, together

_COPY_BYTES = 2 << 30
_SECONDS = 180.0
_TRAINING_SECONDS = 12.0  # between joining and the first publication, for preparation


class Rates(msgspec.Struct, frozen=True):
    """Rates of the driver's copy in bytes per second, counting bytes once: within a GPU, and from another GPU (if there is one)."""

    local: float
    peer: float


class GpuCase(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one case. Times are those of the slowest rank, in milliseconds unless their names say seconds."""

    name: str
    job: Job
    bytes: int
    bytes_from_peers: int
    floor_ms: float
    rates: Rates
    setup_seconds: dict[str, float]
    """Seconds in which ranks joined the coordinator."""
    first: dict[str, float]
    """First round after some seconds of training. ``agree`` is the part of planning, mapping and building tables that was not done
    during training. ``agree_...`` is the whole time of each of these."""
    steady: dict[str, float]
    """Medians of the later rounds."""
    extra_bytes: dict[str, int]
    rounds: list[dict[str, float]]


def measured_rates(devices: Sequence[int]) -> Rates:
    """Measure the copy rates between the first and the last of ``devices``: the best of several copies of 2 GiB."""
    import torch

    def rate(source: int, target: int) -> float:
        payload = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}").random_()
        other = torch.empty_like(payload, device=f"cuda:{target}")
        best = 0.0
        for _ in range(6):
            torch.cuda.synchronize(source)
            torch.cuda.synchronize(target)
            with torch.cuda.device(source):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                begin.record()
                other.copy_(payload)
                end.record()
                end.synchronize()
            best = max(best, 1000 * _COPY_BYTES / begin.elapsed_time(end))
        return best

    rates = Rates(rate(devices[0], devices[0]), rate(devices[0], devices[-1]))
    torch.cuda.empty_cache()
    return rates


def _round(job: Job, trainers: Sequence[Peer], engines: Sequence[Peer], version: int) -> dict[str, float]:
    """Run and check one publication. Returns its times in milliseconds, and table and staging sizes in bytes."""
    together(trainers, _SECONDS, do="change", version=version)
    published = together(trainers, _SECONDS, do="publish", version=version)
    ended = together(engines, _SECONDS, do="last")
    result = published[0]["result"]
    (replica,) = result["replicas"]
    unexpected = any(engine["serving"] != version for engine in ended) or replica["transports"] != [job.transport]
    if unexpected or replica["delivery"] != job.delivery:
        raise RoundFailed(f"the round used another version, transport or delivery than the case requires: {replica}")
    whole = job.delivery == "direct" or len(job.to) == 1
    if replica["verified"] != ("installed" if whole else "received"):
        raise RoundFailed(f"the round was not verified: {replica}")
    if version and job.changed < 1 and replica["base"] != version - 1:
        raise RoundFailed(f"all bytes moved, not only what changed: {replica}")
    parts, phases = replica["parts"], replica["phases"]
    data = sum(parts[name] for name in ("receive", "load", "digest") if name in parts)
    seconds = {
        "publish": max(trainer["ended"] for trainer in published) - min(trainer["begun"] for trainer in published),
        "place": result["phases"]["place"],
        "agree": phases["agree"],
        "stage": phases.get("stage", 0.0),
        "pause_to_resume": max(engine["resumed"] for engine in ended) - min(engine["paused"] for engine in ended),
        "pause_to_resume_at_coordinator": replica["paused_seconds"],
        **{phase: phases[phase] for phase in ("pause", "move", "verify", "commit")},
        **parts,
        "move_without_digest": phases["move"] - parts.get("digest", 0.0),
        "overhead_while_paused": replica["paused_seconds"] - data,
        **{f"agree_{name}": max(engine["times"].get(name, 0.0) for engine in ended) for name in ended[0]["times"]},
    }
    sizes = {name: float(max(engine[name] for engine in ended)) for name in ("table_bytes", "staging_bytes")}
    return {name: round(1000 * value, 3) for name, value in seconds.items()} | sizes | {"bytes": float(replica["nbytes"])}


def run_gpu_case(job: Job, rates: Rates, rounds: int, note: Callable[[str], None]) -> GpuCase:
    """Measure ``rounds`` rounds after the first.

    Args:
        job: The case.
        rates: Rates of :func:`measured_rates`.
        rounds: Number of measured rounds.
        note: Called with progress messages.

    Raises:
        RoundFailed: A round was not completed and verified on every rank.
    """
    manifest = manifest_for(job.model)
    floor, nbytes, from_peers = job.floor(manifest, rates.local, rates.peer)
    note(f"{job.name}: starting {len(job.on)} + {len(job.to)} ranks")
    with BackgroundServer(ServerSettings.load({}, port=0, heartbeat=60.0)) as server, ExitStack() as owned:

        def start(role: str, count: int) -> list[Peer]:
            described = msgspec.to_builtins(job)
            made = [Peer("weightsync_bench.gpu_rank", {"role": role, "rank": rank, "job": described}) for rank in range(count)]
            for peer in made:
                owned.enter_context(peer)
            return made

        engines, trainers = start("engine", len(job.to)), start("trainer", len(job.on))
        for peer in (*trainers, *engines):
            peer.hear(_SECONDS)
        before = together(trainers, _SECONDS, do="memory"), together(engines, _SECONDS, do="memory")
        joined = together(trainers, _SECONDS, do="join", url=server.url, token=server.token)
        if not job.masters and not all(trainer["live"] for trainer in joined):
            raise RoundFailed("a trainer rank does not publish its GPU memory in place")
        setup = {"join_trainer": max(trainer["seconds"] for trainer in joined)}
        setup["join_engine"] = max(
            engine["seconds"] for engine in together(engines, _SECONDS, do="join", url=server.url, token=server.token)
        )
        together(trainers, _SECONDS, do="train", seconds=_TRAINING_SECONDS)
        measured: list[dict[str, float]] = []
        for version in range(rounds + 1):
            measured.append(_round(job, trainers, engines, version))
            note(f"{job.name}: round {version}: {measured[-1]['pause_to_resume']:.1f} ms from pause to resume")
        after = together(trainers, _SECONDS, do="memory"), together(engines, _SECONDS, do="memory")
    return GpuCase(
        name=job.name, job=job, bytes=nbytes, bytes_from_peers=from_peers, floor_ms=1000 * floor, rates=rates, setup_seconds=setup,
        first=measured[0],
        steady={name: statistics.median(measurement[name] for measurement in measured[1:]) for name in measured[0]},
        extra_bytes={
            f"{side}_{what}": max(b[what] - a[what] for a, b in zip(before[index], after[index], strict=True))
            for index, side in enumerate(("trainer", "engine"))
            for what in ("device", "tensors")
        },
        rounds=measured,
    )  # fmt: skip
