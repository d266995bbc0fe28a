"""What tracing a round costs: ``python -m benchmarks.tracing [--mib N] [--rounds N] [--json]`` (OpenTelemetry: extra ``[otel]``).

Three coordinators have the same trainer and engine modules: one traces nothing, one keeps traces, one exports them by OpenTelemetry
to a collector's stand-in, an exporter that drops them. A round of each follows a round of the others, so that all have the same
neighbours on the machine. Times are from the call of ``publish`` to its result. On a machine with other work these differ by more
than tracing costs, so two parts are timed by themselves, in CPU time: recording a span, and exporting a round after its result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

import weightsync
from weightsync.config import ServerSettings
from weightsync.model import RoundTrace
from weightsync.server import app
from weightsync.server.otel import OtelExport
from weightsync.server.server import BackgroundServer
from weightsync.spans import SpanRecorder, recording, span
from weightsync_bench.report import machine, print_json

__all__ = ["TracingCase", "main"]

_LAYERS, _RANKS, _REPLICAS = 8, 2, 2


class TracingCase(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds with one setting."""

    name: str
    ms: float
    """Median from call to result."""
    cpu_ms: float
    """Median of the process's CPU time in a round: coordinator, trainer and engines."""
    spans: int
    spans_ms: float
    """CPU time of recording as many spans, at all ranks and the coordinator together."""
    after_ms: float
    """Median CPU time of exporting, after the result."""
    rounds: int


class _Dropped:
    """An exporter that drops what it gets."""

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is open."""

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


class _TimedExport(OtelExport):
    """Keeps how long each export took, and how many spans it had."""

    def __init__(self) -> None:
        super().__init__(_Dropped())  # type: ignore[arg-type]
        self.seconds: list[float] = []
        self.spans = 0

    def export(self, trace: RoundTrace) -> None:
        started = time.thread_time()
        super().export(trace)
        self.seconds.append(time.thread_time() - started)
        self.spans = 1 + sum(1 + len(track.spans) for track in trace.tracks if track.spans)


def span_seconds(recorder: SpanRecorder | None, count: int = 20_000) -> float:
    """Return the CPU time of one span, recorded or not."""
    with recording(recorder):
        started = time.thread_time()
        for number in range(count):
            with span("read", f"trainer/{number % 16}", "shared_memory", 1):
                pass
        return (time.thread_time() - started) / count


def _model(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))


class _System:
    """A coordinator with a trainer and replicas, all in this process."""

    def __init__(self, owned: ExitStack, settings: dict[str, Any], width: int) -> None:
        self.server = owned.enter_context(BackgroundServer(ServerSettings(port=0, state_dir="off", **settings)))
        options: dict[str, Any] = {"coordinator": self.server.url, "token": self.server.token, "transports": ["shared_memory"]}
        self._trainer = owned.enter_context(weightsync.Trainer(_model(width), **options))
        for replica in range(_REPLICAS):
            for rank in range(_RANKS):
                adapter = weightsync.ModuleAdapter(_model(width))
                owned.enter_context(weightsync.Engine(adapter, f"replica-{replica}", rank=rank, world_size=_RANKS, **options))
        self._trainer.wait_for_replicas(_REPLICAS)
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def round(self) -> None:
        """Publish once."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._trainer.publish()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the model")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    width = int((options.mib * (1 << 20) / (4 * _LAYERS)) ** 0.5)
    exports: list[_TimedExport] = []

    def export() -> _TimedExport:
        exports.append(_TimedExport())
        return exports[-1]

    coordinator: Any = app
    coordinator.OtelExport = export
    kinds: dict[str, dict[str, Any]] = {"off": {"traces": 0}, "traces": {}, "traces and OpenTelemetry": {"otel": "on"}}
    with ExitStack() as owned:
        systems = {name: _System(owned, settings, width) for name, settings in kinds.items()}
        for number in range(options.rounds + 2):
            order = list(systems.values())
            for system in order[number % 3 :] + order[: number % 3]:
                system.round()
        after = exports[0]
    cases = [
        TracingCase(
            name=name, ms=round(1000 * statistics.median(system.wall[2:]), 2),
            cpu_ms=round(1000 * statistics.median(system.cpu[2:]), 2),
            spans=after.spans, rounds=options.rounds,
            spans_ms=round(1000 * after.spans * span_seconds(None if name == "off" else SpanRecorder()), 3),
            after_ms=round(1000 * statistics.median(after.seconds[2:]), 3) if "otel" in kinds[name] else 0.0,
        )
        for name, system in systems.items()
    ]  # fmt: skip
    table = Table(title=f"{options.mib} MiB to {_REPLICAS} replicas of {_RANKS} ranks")
    for heading in ("tracing", "round, ms", "its CPU, ms", "spans", "their CPU, ms", "after the result, CPU ms"):
        table.add_column(heading, justify="left" if heading == "tracing" else "right")
    for case in cases:
        table.add_row(
            case.name, f"{case.ms:.1f}", f"{case.cpu_ms:.1f}", str(case.spans), f"{case.spans_ms:.3f}", f"{case.after_ms:.2f}"
        )
    Console(stderr=True, width=120).print(table)
    if options.json:
        print_json(cases, machine())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
