"""What people see: a line for the round, a line for each replica, live; and the tables at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.demo.records import Order
from weightsync.coordinator.events import Event, ReplicaBytes, ReplicaEnded, ReplicaPhase, RoundEnded, RoundStarted
from weightsync.model import FIRST_EPOCH, in_words
from weightsync.protocol.messages import ReplicaResult, RoundResult

__all__ = ["PHASES", "View", "label", "rounds_table", "size"]

PHASES = ("agree", "pause", "move", "verify", "commit")


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def label(version: Order) -> str:
    """Number of a version, with its epoch before it after the first."""
    epoch, number = version
    return str(number) if epoch == FIRST_EPOCH else f"{epoch}@{number}"


def rate(result: ReplicaResult) -> str:
    """Gigabytes a second of the move, verification included where it is part of it."""
    seconds = result.phases.get("move", 0.0)
    return f"{result.nbytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else "-"


@dataclass
class _Line:
    phase: str = "starting"
    nbytes: int = 0
    total: int = 0
    speed: str = ""
    version: str = "none"
    moving_since: float = 0.0


class View:
    """Shows events as they come: redrawn in place on a terminal, else a line for each round and for each replica in it."""

    def __init__(self, console: Console, replicas: Iterable[str]) -> None:
        self._console = console
        self._lines = {name: _Line() for name in replicas}
        self._headline = "starting processes"
        self._loss = ""
        self._epoch = FIRST_EPOCH
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A lasting line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def headline(self, text: str) -> None:
        """What goes on right now."""
        self._headline = text
        if self._live is None:
            self.say(text)

    def loss(self, step: int, loss: float) -> None:
        """A training step's loss."""
        self._loss = f"step {step}, loss {loss:.3f}"

    def show(self, event: Event) -> None:
        """Take in one of the coordinator's events."""
        match event:
            case RoundStarted():
                self._epoch = event.epoch
                doing, version = "re-seeding" if event.seeding else "publishing", label((event.epoch, event.number))
                self._headline = f"round {event.round}: {doing} version {version}"
            case ReplicaPhase():
                line = self._line(event.replica)
                line.phase = event.phase
                if event.phase == "move":
                    line.moving_since, line.nbytes = time.perf_counter(), 0
            case ReplicaBytes():
                line = self._line(event.replica)
                line.nbytes, line.total = event.nbytes, event.total
                line.speed = f"{event.nbytes / max(time.perf_counter() - line.moving_since, 1e-9) / 1e9:.2f} GB/s"
            case ReplicaEnded():
                self._ended(event.round, event.result)
            case RoundEnded():
                self._round_ended(event)
            case _:
                pass

    def _line(self, replica: str) -> _Line:
        return self._lines.setdefault(replica, _Line())

    def _ended(self, number: int, result: ReplicaResult) -> None:
        line = self._line(result.name)
        line.phase = in_words(result.state)
        line.version = "none" if result.version is None else label((self._epoch, result.version))
        line.nbytes = line.total = result.nbytes
        line.speed = rate(result)
        if self._live is None or result.error:
            self.say(
                f"  round {number}  {result.name}  {line.phase}  {size(result.nbytes)}  {line.speed}  version {line.version}"
                + (f"  {result.error}" if result.error else "")
            )

    def _round_ended(self, event: RoundEnded) -> None:
        if event.result is None:
            self.say(f"round {event.round}  failed: {event.error}")
            return
        result = event.result
        self.say(
            f"round {event.round}  version {label(result.version.order)}  {size(result.nbytes)}  in {result.seconds * 1e3:.0f} ms  "
            f"{sum(r.state == 'loaded' for r in result.replicas)} of {len(result.replicas)} replicas"
            + (f"  ({self._loss})" if self._loss else "")
        )
        self._headline = "training"

    def _render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        for _ in range(6):
            grid.add_column()
        for name, line in self._lines.items():
            done = min(1.0, line.nbytes / line.total) if line.total else 0.0
            bar = "━" * round(20 * done)
            done_text = Text(f"{bar:<20}", style="green")
            grid.add_row(f"  {name}", line.phase, done_text, f"{size(line.nbytes):>9}", line.speed, f"version {line.version}")
        return Group(Text(f"{self._headline}   {self._loss}", style="bold"), grid)


def rounds_table(results: Iterable[RoundResult], equal: Mapping[tuple[Order, str], bool]) -> Table:
    """One row per version and replica: time of each phase, bytes, speed, result, and whether its tokens were the checkpoint's."""
    table = Table(title="versions and replicas (times in milliseconds)", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("version", "replica"):
        table.add_column(name, no_wrap=True)
    for name in (*PHASES, "bytes", "speed", "paused"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("tokens equal")
    for result in results:
        changed = "" if result.changed is None else f" ({100 * result.changed:.2g} % changed)"
        for replica in sorted(result.replicas, key=lambda found: found.name):
            times = [f"{replica.phases[phase] * 1e3:.1f}" if phase in replica.phases else "-" for phase in PHASES]
            same = equal.get((result.version.order, replica.name))
            table.add_row(
                label(result.version.order) + changed, replica.name, *times, size(replica.nbytes), rate(replica),
                f"{replica.paused_seconds * 1e3:.1f}", replica.verified or replica.state,
                {True: "[green]yes", False: "[red]NO", None: "[red]not asked"}[same],
            )  # fmt: skip
        table.add_section()
    return table
