"""Terminal output of the commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import typer
from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weightsync.coordinator import events
from weightsync.coordinator.status import RankStatus, ReplicaStatus, Status
from weightsync.errors import readable
from weightsync.model import FIRST_EPOCH, in_words, milliseconds
from weightsync.protocol.messages import ReplicaResult, RoundResult
from weightsync.protocol.round_log import size
from weightsync.server.findings import Finding
from weightsync.server.history import RoundRecord

T = TypeVar("T")

_COLOR = {
    "ok": "green", "limited": "yellow", "absent": "dim", "unknown": "magenta",
    "failed": "red", "registered": "dim", "loaded": "green", "updating": "yellow", "dirty": "red", "lost": "red", "left": "dim",
    "refused": "red",
}  # fmt: skip
_SHOWN = {"missing": "absent"}  # JSON keeps its word
_NEEDED = ("python", "loopback", "numba")
"""Findings of ``doctor`` without which trainers and engines cannot work on a machine."""
_SHOWN_ROUNDS = 5
_SHOWN_ADAPTERS = 20
_SHOWN_NAMES = 4
_OPTIONAL_COLUMNS = ("by transport", "GB/s", "version", "bytes", "replicas", "ended", "run", "pause")  # the first to hide first
_TEXTS = ("outcome", "slowest", "by transport")
_RANK_WIDTH = 12  # a longer name is shortened before a column is hidden
_UNLIMITED = 1 << 20  # columns
_HALF_A_DAY = 43200.0


def show(value: T, view: Callable[[T], RenderableType], *, as_json: bool) -> None:
    """Print ``value`` to standard output: its view in the width of the terminal, or one JSON object."""
    if as_json:
        typer.echo(msgspec.json.encode(value).decode())
    else:
        Console().print(view(value))


def _rate(of: RoundResult | RoundRecord) -> str:
    """Format the rate of a round in GB/s (10^9); empty if there is none."""
    return f"{of.gigabytes_per_second:.2f}" if of.nbytes else ""


def plain_text(text: str, style: str = "") -> Text:
    """Text from another process, without markup and control characters."""
    return Text(readable(text), style=style)


def _colored(word: str) -> Text:
    return plain_text(word, _COLOR.get(word, ""))


def doctor_table(findings: Sequence[Finding]) -> RenderableType:
    """The verdict, and one row for each finding, with its impact below it."""
    broken = [finding.name for finding in findings if finding.status != "ok" and finding.name in _NEEDED]
    other = [finding.name for finding in findings if finding.status != "ok" and finding.name not in _NEEDED]
    verdict = plain_text(f"not ready: {', '.join(broken)}" if broken else "ready", "bold red" if broken else "bold green")
    if other:
        verdict.append_text(plain_text(f"; not here, or limited: {', '.join(other)}"))
    rows = ((finding.name, _colored(_SHOWN.get(finding.status, finding.status)), _impact(finding)) for finding in findings)
    return Group(verdict, titled_table("this machine", ("", "status", "~value, and impact if absent"), rows))


def _impact(finding: Finding) -> Text:
    text = plain_text(finding.value)
    return text.append(f"\n{finding.cost}", style="dim") if finding.cost else text


def status_view(status: Status) -> RenderableType:
    """A summary, problems with their fixes, replicas and the last rounds. Errors follow their table."""
    views: list[RenderableType] = [_heading(status), *_alerts(status)]
    if not status.replicas:
        return Group(*views, Text("no replica has joined yet", style="dim"), *_rounds(status))
    rows = (
        (
            replica.name, _state(replica), _number(replica.version, replica.epoch), replica.staleness,
            age(status.now - replica.since), replica.verified or None,
            None if replica.paused_seconds is None else milliseconds(replica.paused_seconds),
            f"{len(replica.ranks)}/{replica.world_size}", _where(replica.ranks or replica.gone),
        )
        for replica in status.replicas
    )  # fmt: skip
    headings = ("replica", "state", ">version", ">behind", ">for", "verified", ">pause", ">ranks", "~where")
    views.append(titled_table("replicas", headings, rows))
    listed = {alert.subject for alert in status.alerts if alert.level == "error"}
    other = [replica for replica in status.replicas if replica.name not in listed]
    views += notes((r.name, plain_text(_absent(r), "yellow")) for r in other if r.missing and r.state != "left")
    views += notes((r.name, _departure(r, status)) for r in other if r.state == "left")
    views += notes((r.name, plain_text(r.error, "red")) for r in other if r.error)
    return Group(*views, *adapters_view(status), *_rounds(status))


def adapters_view(status: Status) -> Iterator[RenderableType]:
    """A row for each of the first adapters by name: its newest version, the earlier ones, and which replicas serve them."""
    versions: dict[str, list[str]] = {}
    for adapter in status.adapters:
        versions.setdefault(adapter.name, []).insert(0, f"{adapter.version} at {_few(adapter.replicas, 'replicas')}")
    if versions:
        rows = [(name, newest, "; ".join(earlier) or None) for name, (newest, *earlier) in versions.items()]
        yield titled_table("adapters", ("adapter", "~newest version", "~earlier versions"), rows[:_SHOWN_ADAPTERS])
        if len(rows) > _SHOWN_ADAPTERS:
            yield Text(f"and {len(rows) - _SHOWN_ADAPTERS:,} more, which status --json lists", style="dim")


def _alerts(status: Status) -> Iterator[RenderableType]:
    for alert in status.alerts:
        line = plain_text(f"{alert.level}: ", "bold red" if alert.level == "error" else "bold yellow")
        line.append_text(plain_text(f"{alert.text} ({age(status.now - alert.since)} ago)"))
        yield line
        yield Padding(plain_text(f"fix: {alert.fix}"), (0, 0, 0, 2))


def _state(replica: ReplicaStatus | ReplicaResult) -> Text:
    return plain_text(in_words(replica.state), _COLOR.get(replica.state, ""))


def _where(ranks: Sequence[RankStatus]) -> str:
    """Hosts with process ids, or their number if there are many."""
    hosts: dict[str, list[str]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(str(rank.pid))
    return "; ".join(f"{host}: {_few(pids, 'processes')}" for host, pids in hosts.items())


def _few(names: Sequence[str], what: str) -> str:
    return ", ".join(names) if len(names) <= _SHOWN_NAMES else f"{len(names)} {what}"


def _departure(replica: ReplicaStatus, status: Status) -> Text:
    """The last version that a replica received before it left on purpose, as rollout ranks of verl do after each update."""
    for result in reversed(status.rounds):
        if any(row.name == replica.name and row.error is None for row in result.replicas):
            return plain_text(f"left after it received version {_number(result.version.number, result.version.epoch)}", "dim")
    return plain_text("left before it received a version", "dim")


def _absent(replica: ReplicaStatus) -> str:
    """Listed missing ranks, and the number of further ones."""
    more = replica.world_size - len(replica.ranks) - len(replica.missing)
    *names, last = [*map(str, replica.missing), *([f"{more:,} more"] if more > 0 else [])]
    return f"ranks {', '.join(names)} and {last} are not connected" if names else f"rank {last} is not connected"


def _heading(status: Status) -> Text:
    known = [replica for replica in status.replicas if replica.state != "left"]
    serving = sum(replica.state == "loaded" and not replica.staleness for replica in known)
    parts = ["nothing published yet"]
    if status.last >= 0:
        parts = [f"last published: version {_number(status.last, status.epoch)}, served by {serving} of {len(known)} replicas"]
    updated = next((result.ended for result in reversed(status.rounds) if result.ok), None)
    if updated is not None:
        parts.append(f"last update {age(status.now - updated)} ago")
    parts.append(f"trainer ranks: {len(status.trainer)} of {status.trainer_expected or status.trainer_world_size}")
    if status.busy:
        parts.append("a round is running")
    return plain_text(f"{_clock(status.now, status.now)}  run {status.run}: {'; '.join(parts)}")


def titled_table(
    title: str, headings: Iterable[str], rows: Iterable[Iterable[object]] = (), overflow: OverflowMethod = "fold"
) -> Table:
    """Return a table in the style of all commands.

    A heading that starts with ``>`` is of a column of numbers, with ``~`` of text that may wrap. Cells are Rich's texts and bars,
    or any value, which is shown without markup; ``None`` is a dash.
    """
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for heading in headings:
        table.add_column(
            heading.lstrip(">~"), justify="right" if heading[:1] == ">" else "left", no_wrap=heading[:1] != "~", overflow=overflow
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text | Bar) else plain_text(_cell(cell)) for cell in row))
    return table


def notes(lines: Iterable[tuple[str, Text]]) -> Iterator[RenderableType]:
    """Lines ``name: text`` below a table, wrapped and indented."""
    for name, text in lines:
        yield Padding(plain_text(f"{name}: ").append_text(text), (0, 0, 0, 2))


def age(seconds: float) -> str:
    """Format a duration in its largest unit: ``12 s``, ``3 min``, ``2 h``, ``5 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _clock(when: float, now: float) -> str:
    """Local time of day, with the date in front if ``when`` is more than half a day from ``now``."""
    return time.strftime("%H:%M:%S" if abs(now - when) < _HALF_A_DAY else "%m-%d %H:%M", time.localtime(when))


def _number(number: int | None, epoch: int | None) -> str:
    """Version within its run: ``400``, in the second epoch ``2@400``."""
    return _cell(number) if epoch in (None, FIRST_EPOCH) else f"{epoch}@{_cell(number)}"


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _rounds(status: Status) -> Iterator[RenderableType]:
    rounds = status.rounds[-_SHOWN_ROUNDS:]
    if not rounds:
        return
    rows = (
        (
            _clock(result.ended, status.now), result.round, _number(result.version.number, result.version.epoch),
            size(result.nbytes), f"{result.seconds:.3f}", _rate(result),
            milliseconds(result.longest_pause),
            _colored("ok" if result.ok else "failed"),
        )
        for result in rounds
    )  # fmt: skip
    headings = (">ended", ">round", ">version", ">bytes", ">seconds", ">GB/s", ">longest pause", "outcome")
    yield titled_table("last rounds", headings, rows)
    shown = {(replica.name, replica.error) for replica in status.replicas}
    yield from _failures((_failure(result, shown), result.round) for result in rounds if not result.ok)


def _failures(failed: Iterable[tuple[str, int]]) -> Iterator[RenderableType]:
    """Notes of errors, each with all rounds that failed by it."""
    rounds: dict[str, list[str]] = {}
    for error, number in failed:
        rounds.setdefault(error, []).append(str(number))
    return notes((f"round {', '.join(numbers)}", plain_text(error, "red")) for error, numbers in rounds.items())


def rounds_view(records: Sequence[RoundRecord]) -> RenderableType:
    """Rounds of the history, one line each. Errors follow the table."""
    if not records:
        return Text("no round has ended yet", style="dim")
    several = len({record.run for record in records}) > 1
    rows = [_cells(record, records[-1].ended, several) for record in records]
    return Group(_RoundsTable(rows), *_failures((record.error, record.round) for record in records if record.error))


def _cells(record: RoundRecord, now: float, several: bool) -> dict[str, Text]:
    """Cells of a round by heading; with its run if there are ``several``."""
    slowest = record.slowest
    return {
        "ended": plain_text(_clock(record.ended, now)),
        **({"run": plain_text(record.run)} if several else {}),
        "round": plain_text(str(record.round)),
        "version": plain_text(_number(record.number, record.epoch)),
        "bytes": plain_text(size(record.nbytes)),
        "seconds": plain_text(f"{record.seconds:.3f}"),
        "GB/s": plain_text(_rate(record)),
        "pause": plain_text(milliseconds(record.pause_seconds)),
        "replicas": plain_text(f"{record.updated}/{record.replicas}"),
        "outcome": _colored("ok" if record.ok else "interrupted" if record.interrupted else "failed")
        + plain_text(" (late)" if record.kind == "seed" else "", "dim"),
        "slowest": plain_text("" if slowest is None else f"{slowest.phase} {milliseconds(slowest.seconds)}"),
        "at rank": plain_text("" if slowest is None else slowest.rank),
        "by transport": plain_text(", ".join(f"{name} {size(nbytes)}" for name, nbytes in sorted(record.transports.items()))),
    }


class _RoundsTable:
    """One line per round, whatever the width: hides columns until the others fit, and names them below the table."""

    def __init__(self, rows: Sequence[Mapping[str, Text]]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width + max(0, max(row["at rank"].cell_len for row in self._rows) - _RANK_WIDTH)
        hidden: list[str] = []
        table = self._without(hidden)
        for heading in _OPTIONAL_COLUMNS:
            if Measurement.get(console, options.update(max_width=_UNLIMITED), table).maximum <= width:
                break
            hidden.append(heading)
            table = self._without(hidden)
        yield table
        if hidden:
            yield Text(f"hidden at this width: {', '.join(heading for heading in self._rows[0] if heading in hidden)}", style="dim")

    def _without(self, hidden: Collection[str]) -> Table:
        kept = [heading for heading in self._rows[0] if heading not in hidden]
        # Rich shortens a column that may wrap first; its overflow keeps the line whole.
        headings = ("~at rank" if name == "at rank" else name if name in _TEXTS else f">{name}" for name in kept)
        return titled_table("rounds", headings, ([row[name] for name in kept] for row in self._rows), overflow="ellipsis")


def _failure(result: RoundResult, shown: Collection[tuple[str, str | None]]) -> str:
    """Return the reason why a round failed. Replicas whose error is already in ``shown`` are only named."""
    text = result.error or "failed"
    for replica in result.replicas:
        if replica.error and (replica.name, replica.error) in shown:
            text = text.replace(f"{replica.name}: {replica.error}", replica.name)
    return text


def round_view(result: RoundResult) -> RenderableType:
    """One round: a row for each replica with milliseconds by phase. Delivery and errors follow the table."""
    known = {name for replica in result.replicas for name in replica.phases}
    phases = [name for name in ("agree", "wait", "pause", "move", "verify", "commit") if name in known]
    rows = (
        (
            replica.name, _colored("failed") if replica.state == "dirty" else _state(replica), size(replica.nbytes),
            *(f"{1000 * replica.phases[name]:.1f}" if name in replica.phases else "" for name in phases),
        )
        for replica in result.replicas
    )  # fmt: skip
    title = f"round {result.round}: version {_number(result.version.number, result.version.epoch)}, milliseconds by phase"
    ways: dict[str, list[str]] = {}
    for replica in result.replicas:
        if replica.verified:
            way = f"{replica.delivery} by {', '.join(replica.transports)}, verified as {replica.verified}"
            ways.setdefault(way, []).append(replica.name)
    return Group(
        titled_table(title, ("replica", "state", ">bytes", *(f">{name}" for name in phases)), rows),
        *notes((", ".join(names), plain_text(way)) for way, names in ways.items()),
        *notes(
            (replica.name, plain_text(replica.error, "red"))
            for replica in result.replicas
            if replica.error and replica.error not in (result.error or "")
        ),
        _outcome(result),
    )


def _outcome(result: RoundResult) -> Text:
    return Text("ok", style="green") if result.ok else plain_text(result.error or "failed", "red")


def event_line(event: events.Event) -> str:
    """Format one event as one line, whatever its texts contain."""
    return " ".join(readable(_event_line(event)).split())


def _event_line(event: events.Event) -> str:
    match event:
        case events.Joined():
            return f"{event.member} joined"
        case events.Left():
            return f"{event.member} left: {event.reason}"
        case events.RoundStarted():
            what = "bringing" if event.seeding else "publishing"
            version, whom = _number(event.number, event.epoch), ", ".join(event.replicas) or "no replica"
            return f"round {event.round}: {what} version {version} to {whom}"
        case events.ReplicaPhase():
            return f"round {event.round}: {event.replica}: {event.phase}"
        case events.ReplicaBytes():
            return f"{event.replica}: {size(event.nbytes)} of {size(event.total)}"
        case events.ReplicaEnded():
            result = event.result
            how = f" ({result.verified})" if result.verified else ""
            end = f": {result.error}" if result.error else f", version {_number(result.version, result.epoch)}{how}"
            return f"round {event.round}: {result.name}: {in_words(result.state)}{end}"
        case events.Audited():
            reason = f": {event.error}" if event.error else ""
            return f"{event.replica}: its weights were read again in {event.seconds:.3f} s{reason}"
        case events.RoundEnded():
            if event.result is None:
                return f"round {event.round}: failed: {event.error}"
            nbytes, seconds = event.result.nbytes, event.result.seconds
            rate = f" ({_rate(event.result)} GB/s)" if nbytes else ""
            outcome, why = ("ok", "") if event.result.ok else ("failed", f": {event.error}")
            return f"round {event.round}: {outcome}, {size(nbytes)} in {seconds:.3f} s{rate}{why}"
