"""Terminal output of the commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import typer
from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weightsync.coordinator.events import Event, Joined, Left, ReplicaBytes, ReplicaEnded, ReplicaPhase, RoundEnded, RoundStarted
from weightsync.coordinator.status import ReplicaStatus, Status
from weightsync.errors import readable
from weightsync.model import FIRST_EPOCH
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.round_log import size
from weightsync.server.findings import Finding
from weightsync.server.history import RoundRecord

if TYPE_CHECKING:
    from weightsync.bench.forecast.forecast import Forecast, RefitForecast

__all__ = [
    "age",
    "doctor_table",
    "event_line",
    "forecast_view",
    "gigabytes_per_second",
    "links_view",
    "round_view",
    "rounds_view",
    "show",
    "status_view",
]

T = TypeVar("T")

_COLOR = {
    "ok": "green", "limited": "yellow", "missing": "dim", "unknown": "magenta",
    "failed": "red", "registered": "dim", "loaded": "green", "updating": "yellow", "dirty": "red", "lost": "red", "left": "dim",
    "refused": "red",
}  # fmt: skip
_SHOWN_ROUNDS = 5
_OPTIONAL_COLUMNS = ("by transport", "GB/s", "bytes", "pause", "replicas", "version", "ended")  # of rounds, the first to hide first
_RANK_WIDTH = 12  # a longer name is shortened before a column is hidden
_UNLIMITED = 1 << 20  # columns
_HALF_A_DAY = 43200.0
_KILO, _WHOLE_SECONDS, _WHOLE_MILLISECONDS, _BAR_WIDTH = 1000, 100, 10, 24
_SCHEMES = {"gathered": "gather whole tensors first", "broadcast": "broadcast everything to everybody"}


def show(value: T, view: Callable[[T], RenderableType], *, as_json: bool) -> None:
    """Print ``value`` to standard output: its view in the width of the terminal, or one JSON object."""
    if as_json:
        typer.echo(msgspec.json.encode(value).decode())
    else:
        Console().print(view(value))


def gigabytes_per_second(nbytes: int, seconds: float) -> str:
    """Format a rate in GB/s (10^9); empty if there is none."""
    return f"{nbytes / seconds / 1e9:.2f}" if seconds > 0 and nbytes else ""


def _plain_text(text: str, style: str = "") -> Text:
    """Text from another process, without markup and control characters."""
    return Text(readable(text), style=style)


def _colored(word: str) -> Text:
    return _plain_text(word, _COLOR.get(word, ""))


def doctor_table(findings: Sequence[Finding]) -> Table:
    """One row for each finding, with its impact below it."""
    table = _table("this machine")
    for heading, fixed in (("", True), ("status", True), ("value, and impact if missing", False)):
        table.add_column(heading, no_wrap=fixed, overflow="fold")
    for finding in findings:
        text = _plain_text(finding.value)
        if finding.cost:
            text.append(f"\n{finding.cost}", style="dim")
        table.add_row(finding.name, _colored(finding.status), text)
    return table


def status_view(status: Status) -> RenderableType:
    """Replicas and the last rounds, one line each. Errors follow their table."""
    views: list[RenderableType] = [_heading(status)]
    if not status.replicas:
        views.append(Text("no replica has joined yet", style="dim"))
        return Group(*views, *_rounds(status))
    replicas = _table("replicas")
    replicas.add_column("replica", no_wrap=True)
    replicas.add_column("state", no_wrap=True)
    for heading in ("version", "behind", "for", "ranks"):
        replicas.add_column(heading, justify="right", no_wrap=True)
    replicas.add_column("adapter", no_wrap=True)
    for replica in status.replicas:
        replicas.add_row(
            _plain_text(replica.name), _colored(replica.state), _plain_text(_number(replica.version, replica.epoch)),
            _plain_text(_cell(replica.staleness)), _plain_text(age(status.now - replica.since)),
            _plain_text(f"{len(replica.ranks)}/{replica.world_size}"), _plain_text(replica.adapter),
        )  # fmt: skip
    views.append(replicas)
    views += _notes(
        (replica.name, _plain_text(f"rank {_absent(replica)} is not connected", "yellow"))
        for replica in status.replicas
        if replica.missing
    )
    views += _notes((replica.name, _plain_text(replica.error, "red")) for replica in status.replicas if replica.error)
    return Group(*views, *_rounds(status))


def _absent(replica: ReplicaStatus) -> str:
    """Listed missing ranks, and the number of further ones."""
    more = replica.world_size - len(replica.ranks) - len(replica.missing)
    return ", ".join(map(str, replica.missing)) + (f" and {more:,} more" if more > 0 else "")


def _heading(status: Status) -> Text:
    seedable = (
        "no version to seed"
        if status.version is None
        else f"version {_number(status.version.number, status.version.epoch)} can be seeded ({status.version.digest})"
    )
    last = "nothing published yet" if status.last < 0 else f"last published: version {_number(status.last, status.epoch)}"
    trainers = f"{len(status.trainer)} of {status.trainer_world_size} trainer ranks"
    running = "; a round is running" if status.busy else ""
    return _plain_text(f"{_clock(status.now, status.now)}  run {status.run}: {last}; {seedable}; {trainers}{running}")


def _table(title: str) -> Table:
    return Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip


def _notes(notes: Iterable[tuple[str, Text]]) -> Iterator[RenderableType]:
    """Lines ``name: text`` below a table, wrapped and indented."""
    for name, text in notes:
        yield Padding(_plain_text(f"{name}: ").append_text(text), (0, 0, 0, 2))


def age(seconds: float) -> str:
    """Format a duration in its largest unit: ``12 s``, ``3 min``, ``2 h``, ``5 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.1f} ms" if value < _WHOLE_MILLISECONDS else f"{value:.0f} ms"


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
    table = _table("last rounds")
    for heading in ("ended", "round", "version", "bytes", "seconds", "GB/s", "longest pause"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for result in rounds:
        table.add_row(
            _clock(result.ended, status.now), str(result.round), _number(result.version.number, result.version.epoch),
            size(result.nbytes), f"{result.seconds:.3f}", gigabytes_per_second(result.nbytes, result.seconds),
            _milliseconds(result.longest_pause),
            _colored("ok" if result.ok else "failed"),
        )  # fmt: skip
    yield table
    shown = {(replica.name, replica.error) for replica in status.replicas}
    yield from _failures((_failure(result, shown), result.round) for result in rounds if not result.ok)


def _failures(failed: Iterable[tuple[str, int]]) -> Iterator[RenderableType]:
    """Notes of errors, each with all rounds that failed by it."""
    rounds: dict[str, list[str]] = {}
    for error, number in failed:
        rounds.setdefault(error, []).append(str(number))
    return _notes((f"round {', '.join(numbers)}", _plain_text(error, "red")) for error, numbers in rounds.items())


def rounds_view(records: Sequence[RoundRecord]) -> RenderableType:
    """Rounds of the history, one line each. Errors follow the table."""
    if not records:
        return Text("no round has ended yet", style="dim")
    rows = [_cells(record, records[-1].ended) for record in records]
    return Group(_RoundsTable(rows), *_failures((record.error, record.round) for record in records if record.error))


def _cells(record: RoundRecord, now: float) -> dict[str, Text]:
    """Cells of a round by heading."""
    slowest = record.slowest
    return {
        "ended": _plain_text(_clock(record.ended, now)),
        "round": _plain_text(str(record.round)),
        "version": _plain_text(_number(record.number, record.epoch)),
        "bytes": _plain_text(size(record.nbytes)),
        "seconds": _plain_text(f"{record.seconds:.3f}"),
        "GB/s": _plain_text(f"{record.gigabytes_per_second:.2f}" if record.nbytes else ""),
        "pause": _plain_text(_milliseconds(record.pause_seconds)),
        "replicas": _plain_text(f"{record.updated}/{record.replicas}"),
        "outcome": _colored("ok" if record.ok else "interrupted" if record.interrupted else "failed")
        + _plain_text(" (seed)" if record.kind == "seed" else "", "dim"),
        "slowest": _plain_text("" if slowest is None else f"{slowest.phase} {_milliseconds(slowest.seconds)}"),
        "at rank": _plain_text("" if slowest is None else slowest.rank),
        "by transport": _plain_text(", ".join(f"{name} {size(nbytes)}" for name, nbytes in sorted(record.transports.items()))),
    }


class _RoundsTable:
    """One line a round, whatever the width: hides columns until the others fit, and names them below the table."""

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
        table = _table("rounds")
        headings = [heading for heading in self._rows[0] if heading not in hidden]
        for heading in headings:
            # Rich shortens a column that may wrap first; its overflow keeps the line whole.
            left, shortened = heading in ("outcome", "slowest", "at rank", "by transport"), heading == "at rank"
            table.add_column(heading, justify="left" if left else "right", no_wrap=not shortened, overflow="ellipsis")
        for row in self._rows:
            table.add_row(*(row[heading] for heading in headings))
        return table


def _failure(result: RoundResult, shown: Collection[tuple[str, str | None]]) -> str:
    """Return the reason why a round failed. Replicas whose error is already in ``shown`` are only named."""
    text = result.error or "failed"
    for replica in result.replicas:
        if replica.error and (replica.name, replica.error) in shown:
            text = text.replace(f"{replica.name}: {replica.error}", replica.name)
    return text


def round_view(result: RoundResult) -> RenderableType:
    """One round: a row for each replica with milliseconds by phase. Delivery and errors follow the table."""
    phases = [
        name
        for name in ("agree", "wait", "pause", "move", "verify", "commit")
        if any(name in replica.phases for replica in result.replicas)
    ]
    table = _table(f"round {result.round}: version {_number(result.version.number, result.version.epoch)}, milliseconds by phase")
    table.add_column("replica", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("bytes", *phases):
        table.add_column(heading, justify="right", no_wrap=True)
    ways: dict[str, list[str]] = {}
    for replica in result.replicas:
        milliseconds = [f"{1000 * replica.phases[name]:.1f}" if name in replica.phases else "" for name in phases]
        table.add_row(_plain_text(replica.name), _colored(replica.state), size(replica.nbytes), *milliseconds)
        if replica.verified:
            way = f"{replica.delivery} by {', '.join(replica.transports)}, verified as {replica.verified}"
            ways.setdefault(way, []).append(replica.name)
    return Group(
        table,
        *_notes((", ".join(names), _plain_text(way)) for way, names in ways.items()),
        *_notes(
            (replica.name, _plain_text(replica.error, "red"))
            for replica in result.replicas
            if replica.error and replica.error not in (result.error or "")
        ),
        _outcome(result),
    )


def _outcome(result: RoundResult) -> Text:
    return Text("ok", style="green") if result.ok else _plain_text(result.error or "failed", "red")


def event_line(event: Event) -> str:
    """Format one event as one line, whatever its texts contain."""
    return " ".join(readable(_event_line(event)).split())


def _event_line(event: Event) -> str:
    match event:
        case Joined():
            return f"{event.member} joined"
        case Left():
            return f"{event.member} left: {event.reason}"
        case RoundStarted():
            what = "re-seeding" if event.seeding else "publishing"
            version, whom = _number(event.number, event.epoch), ", ".join(event.replicas) or "no replica"
            return f"round {event.round}: {what} version {version} to {whom}"
        case ReplicaPhase():
            return f"round {event.round}: {event.replica}: {event.phase}"
        case ReplicaBytes():
            return f"{event.replica}: {size(event.nbytes)} of {size(event.total)}"
        case ReplicaEnded():
            result = event.result
            how = f" ({result.verified})" if result.verified else ""
            end = f": {result.error}" if result.error else f", version {_number(result.version, result.epoch)}{how}"
            return f"round {event.round}: {result.name}: {result.state}{end}"
        case RoundEnded():
            if event.result is None:
                return f"round {event.round}: failed: {event.error}"
            nbytes, seconds = event.result.nbytes, event.result.seconds
            rate = f" ({gigabytes_per_second(nbytes, seconds)} GB/s)" if nbytes else ""
            outcome, why = ("ok", "") if event.result.ok else ("failed", f": {event.error}")
            return f"round {event.round}: {outcome}, {size(nbytes)} in {seconds:.3f} s{rate}{why}"


def forecast_view(forecast: RefitForecast) -> RenderableType:
    """A forecast: what crosses, stages and memory of each transport, links of the best one, and what to change first."""
    refit, usable = forecast.refit, [transport for transport in forecast.transports if not transport.unusable]
    views: list[RenderableType] = [
        Text(
            f"{refit.tensors:,} tensors, {_decimal(refit.nbytes)}; hosts with trainer GPUs: {refit.trainer_hosts}, with "
            f"engine GPUs: {refit.engine_hosts}. An engine GPU receives {_decimal(refit.received)} in {refit.pieces:,} pieces, "
            f"half of the bytes in runs of at most {_decimal(refit.run)}. A trainer GPU sends {_decimal(refit.sent)}."
        )
    ]
    if forecast.refused:
        views.append(_plain_text(f"{forecast.refused}.", "red"))
    stages = _table("seconds by stage (metadata: once, while training goes on; place: before the pause)")
    stages.add_column("transport", no_wrap=True)
    for heading in (*(usable[0].stages if usable else ()), "pause"):
        stages.add_column(heading, justify="right", no_wrap=True)
    memory = _table("extra memory, and what limits the transfer")
    for heading in ("transport", "trainer rank", "engine rank", "coordinator", "bottleneck"):
        memory.add_column(heading, justify="left" if heading in ("transport", "bottleneck") else "right")
    for transport in usable:
        style = "bold" if transport.transport == forecast.best else ""
        seconds = [_seconds(value) for value in (*transport.stages.values(), transport.pause)]
        stages.add_row(transport.transport, *seconds, style=style)
        memory.add_row(
            transport.transport, *map(_decimal, transport.memory.values()), transport.bottleneck.name, style=style
        )  # fmt: skip
    views += [stages, memory]
    views += _notes(
        (transport.transport, _plain_text(f"not usable: {transport.unusable}", "dim"))
        for transport in forecast.transports
        if transport.unusable
    )
    best = next((transport for transport in usable if transport.transport == forecast.best), None)
    if best is not None:
        views += [links_view([best]), _answer(best, forecast.others)]
    if forecast.changes:
        changes = _table("what to change first")
        for heading in ("change", "transport", "metadata", "pause"):
            changes.add_column(heading, justify="left" if heading in ("change", "transport") else "right")
        for change in forecast.changes:
            changes.add_row(change.what, change.transport, _seconds(change.metadata), _seconds(change.pause))
        views.append(changes)
    return Group(*views)


def links_view(transports: Sequence[Forecast]) -> RenderableType:
    """Bars: how long each link of some transports is busy in one round."""
    table = _table("seconds by link at its rate")
    for heading, justify in (("transport", "left"), ("link", "left"), ("bytes", "right"), ("seconds", "right"), ("", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", no_wrap=True)
    longest = max((link.seconds for transport in transports for link in transport.links), default=1.0)
    for transport in transports:
        for number, link in enumerate(transport.links):
            color = "red" if link.seconds == transport.bottleneck.seconds else "blue"
            count = "" if link.name.endswith("posted") else _decimal(link.nbytes)
            bar = Bar(longest, 0, link.seconds, width=_BAR_WIDTH, color=color)
            table.add_row(transport.transport if number == 0 else "", link.name, count, _seconds(link.seconds), bar)
    return table


def _answer(best: Forecast, others: Mapping[str, float]) -> Text:
    lines = [
        f"\n{best.transport}: {_seconds(best.pause)} s from pause to resume; at its rate, the busiest link takes "
        f"{_seconds(best.bottleneck.seconds)} s.",
        f"Basis of the transfer: {best.basis}" + (f", which scatter by a factor of {best.spread:.1f}." if best.spread > 1 else "."),
        *(f"Systems that {_SCHEMES[name]}: {_seconds(value)} s for the transfer." for name, value in others.items()),
    ]
    return _plain_text("\n".join(lines))


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE_SECONDS else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _decimal(nbytes: float) -> str:
    """Format bytes as vendors of links do: ``130.3 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < _KILO:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= _KILO
    return f"{nbytes:.2f} TB"
