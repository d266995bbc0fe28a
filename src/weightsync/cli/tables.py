"""What the commands print for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightsync.cli.doctor import Finding
from weightsync.control.events import Event, Joined, Left, ReplicaBytes, ReplicaEnded, ReplicaPhase, RoundEnded, RoundStarted
from weightsync.control.status import Status
from weightsync.messages import RoundResult

__all__ = ["doctor_table", "event_line", "gigabytes_per_second", "round_view", "show_table", "status_view"]

_COLOR = {
    "ok": "green", "limited": "yellow", "missing": "dim", "unknown": "magenta",
    "registered": "dim", "loaded": "green", "updating": "yellow", "dirty": "red", "lost": "red", "refused": "red",
}  # fmt: skip
_SHOWN_ROUNDS = 5
_KIB = 1024


def show_table(view: RenderableType) -> None:
    """Print to standard output, as wide as the terminal is."""
    Console().print(view)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < _KIB or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= _KIB
    raise RuntimeError("unreachable")


def gigabytes_per_second(nbytes: int, seconds: float) -> str:
    """A rate in GB/s (10^9), empty where there is none."""
    return f"{nbytes / seconds / 1e9:.2f}" if seconds > 0 and nbytes else ""


def _colored(word: str) -> Text:
    return Text(word, style=_COLOR.get(word, ""))


def doctor_table(findings: Sequence[Finding]) -> Table:
    """One row a finding."""
    table = Table(title="what this machine offers", title_justify="left")
    for heading in ("", "status", "found", "what it costs"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, _colored(finding.status), Text(finding.found), Text(finding.cost))
    return table


def status_view(status: Status) -> RenderableType:
    """Who serves which version, and the last rounds."""
    shelves = (
        "nothing to seed from"
        if status.version is None
        else f"version {status.version.number} can be seeded ({status.version.digest})"
    )
    last = "nothing published yet" if status.last < 0 else f"last published: version {status.last}"
    head = Text(
        f"run {status.run}: {last}; {shelves}; {len(status.trainer)} of {status.trainer_world_size} trainer ranks"
        + ("; a round is running" if status.busy else "")
    )
    replicas = Table(title="replicas", title_justify="left")
    for heading, justify in (
        ("replica", "left"),
        ("state", "left"),
        ("version", "right"),
        ("behind", "right"),
        ("digest", "left"),
        ("ranks", "left"),
        ("adapter", "left"),
        ("last error", "left"),
    ):
        replicas.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for replica in status.replicas:
        missing = f" (missing {', '.join(map(str, replica.missing))})" if replica.missing else ""
        replicas.add_row(
            Text(replica.name), _colored(replica.state), _cell(replica.version), _cell(replica.staleness), _cell(replica.digest),
            f"{len(replica.ranks)}/{replica.world_size}{missing}", Text(replica.adapter), Text(replica.error or "", style="red"),
        )  # fmt: skip
    views: list[RenderableType] = [head, replicas if status.replicas else Text("no replica has joined yet", style="dim")]
    if status.rounds:
        views.append(_rounds(status.rounds[-_SHOWN_ROUNDS:]))
    return Group(*views)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _rounds(rounds: Sequence[RoundResult]) -> Table:
    table = Table(title="last rounds", title_justify="left")
    for heading in ("round", "version", "bytes", "seconds", "GB/s", "longest pause"):
        table.add_column(heading, justify="right")
    table.add_column("outcome", overflow="fold")
    for one in rounds:
        pause = max((replica.paused_seconds for replica in one.replicas), default=0.0)
        numbers = (str(one.round), str(one.version.number), _size(one.nbytes), f"{one.seconds:.3f}")
        table.add_row(*numbers, gigabytes_per_second(one.nbytes, one.seconds), f"{1000 * pause:.0f} ms", _outcome(one))
    return table


def round_view(result: RoundResult) -> RenderableType:
    """One round: a row a replica, with the seconds of each phase."""
    phases = [name for name in ("agree", "pause", "move", "verify", "commit") if any(name in one.phases for one in result.replicas)]
    table = Table(title=f"round {result.round}: version {result.version.number}", title_justify="left")
    for heading in ("replica", "state", "bytes", *(f"{name} ms" for name in phases), "delivery", "transport", "digest", "error"):
        table.add_column(heading, justify="right" if heading.endswith(" ms") or heading == "bytes" else "left", overflow="fold")
    for one in result.replicas:
        seconds = [f"{1000 * one.phases[name]:.1f}" if name in one.phases else "" for name in phases]
        how = (one.delivery, ", ".join(one.transports), one.digest or "-")
        table.add_row(Text(one.name), _colored(one.state), _size(one.nbytes), *seconds, *how, Text(one.error or "", style="red"))
    return Group(table, _outcome(result))


def _outcome(result: RoundResult) -> Text:
    return Text("ok", style="green") if result.ok else Text(result.error or "failed", style="red")


def event_line(event: Event) -> str:
    """One event as one line."""
    match event:
        case Joined():
            return f"{event.member} joined"
        case Left():
            return f"{event.member} left: {event.reason}"
        case RoundStarted():
            what = "re-seeding" if event.seeding else "publishing"
            return f"round {event.round}: {what} version {event.number} to {', '.join(event.replicas) or 'no replica'}"
        case ReplicaPhase():
            return f"round {event.round}: {event.replica}: {event.phase}"
        case ReplicaBytes():
            return f"{event.replica}: {_size(event.nbytes)} of {_size(event.total)}"
        case ReplicaEnded():
            one = event.result
            return f"round {event.round}: {one.name}: {one.state}" + (f": {one.error}" if one.error else f", version {one.version}")
        case RoundEnded():
            if event.result is None:
                return f"round {event.round}: failed: {event.error}"
            nbytes, seconds = event.result.nbytes, event.result.seconds
            rate = f" ({gigabytes_per_second(nbytes, seconds)} GB/s)" if nbytes else ""
            return f"round {event.round}: {'ok' if event.result.ok else event.error}, {_size(nbytes)} in {seconds:.3f} s{rate}"
