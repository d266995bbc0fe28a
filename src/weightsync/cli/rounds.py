"""``weightsync rounds`` and ``weightsync trace``: the history of rounds, and where the time of one went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer

from weightsync.cli.tables import rounds_view, show
from weightsync.config import ClientSettings
from weightsync.errors import ConfigurationError
from weightsync.model import RoundTrace, Track
from weightsync.server.client import Client
from weightsync.server.history import MOST_ROUNDS


def list_rounds(settings: ClientSettings, count: int, run: str | None, *, as_json: bool) -> None:
    """Print the last ``count`` rounds, of all runs of the user or of ``run`` alone."""
    with Client(settings) as client:
        records = client.rounds(count if run is None else MOST_ROUNDS)
    show(tuple(record for record in records if run in (None, record.run))[-count:], rounds_view, as_json=as_json)


def write_trace(settings: ClientSettings, number: int | None, path: Path) -> None:
    """Write the trace of a round to ``path``, for Perfetto or Chrome.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    with Client(settings) as client:
        trace = client.trace(number)
    try:
        path.write_bytes(msgspec.json.encode(chrome_trace(trace)))
    except OSError as error:
        raise ConfigurationError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    slowest = trace.slowest()
    typer.echo(f"round {trace.round}: {trace.seconds:.3f} s{'' if slowest is None else f', slowest: {slowest}'}")
    typer.echo(f"wrote {path}; open it at https://ui.perfetto.dev or chrome://tracing")


def chrome_trace(trace: RoundTrace) -> dict[str, Any]:
    """Return a round as events of the Trace Event Format: a process for each party, a track for each rank.

    Spans of a rank that overlap, such as reads from several trainer ranks, are on further tracks below its own.
    """
    events: list[dict[str, Any]] = []
    parties: dict[str, int] = {}
    for track in trace.tracks:
        party, name = _place(track)
        if party not in parties:
            parties[party] = len(parties) + 1
            events.append(_named("process_name", parties[party], 0, party))
        events += _events(trace, track, parties[party], sum(event["name"] == "thread_name" for event in events), name)
    error = max((track.clock_error for track in trace.tracks), default=0.0)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "round": trace.round, "version": trace.number, "epoch": trace.epoch, "run": trace.run, "seconds": trace.seconds,
            "trace_id": trace.trace_id, "error": trace.error, "clock_error_us": 1e6 * error,
        },
    }  # fmt: skip


def _place(track: Track) -> tuple[str, str]:
    """Return the names of a track's process and of its thread."""
    if track.party in ("coordinator", "replica"):
        return "coordinator", track.member if track.party == "coordinator" else f"phases of {track.member}"
    party, _, rank = track.member.rpartition("/")
    return party, f"rank {rank}"


def _events(trace: RoundTrace, track: Track, process: int, before: int, name: str) -> Iterator[dict[str, Any]]:
    lanes: list[float] = []
    clock = {"clock_offset_us": 1e6 * track.clock_offset, "clock_error_us": 1e6 * track.clock_error}
    for span in track.spans:
        lane = next((index for index, end in enumerate(lanes) if end <= span.start), len(lanes))
        if lane == len(lanes):
            lanes.append(0.0)
            yield _named("thread_name", process, before + lane + 1, name if lane == 0 else f"{name} ({lane + 1})")
        lanes[lane] = span.start + span.seconds
        read = {"transport": span.transport, "bytes": span.nbytes} if span.transport else {}
        yield {
            "name": span.name if not span.source or track.party == "replica" else f"{span.name} {span.source}",
            "cat": track.party, "ph": "X", "pid": process, "tid": before + lane + 1,
            "ts": 1e6 * (trace.started + span.start), "dur": 1e6 * span.seconds,
            "args": {"member": track.member, "busy_us": 1e6 * span.busy, **read, **clock},
        }  # fmt: skip


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
