"""What people see while it runs: one line, live, and a lasting line now and then."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from examples.grpo.outcome import Record
from examples.grpo.reports import Progress
from examples.grpo.settings import Settings

__all__ = ["View"]


class View:
    """Shows what the trainer says: redrawn in place on a terminal, else a line every tenth step."""

    def __init__(self, console: Console, wish: Settings) -> None:
        self._console, self._wish = console, wish
        self._text = "starting processes"
        self._live = (
            Live(console=console, get_renderable=lambda: Text(self._text, style="bold"), refresh_per_second=8, transient=True)
            if console.is_terminal
            else None
        )

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
        self._text = text
        if self._live is None:
            self.say(text)

    def progress(self, last: Progress, record: Record) -> None:
        """One step more."""
        staleness = " ".join(f"{behind}:{count}" for behind, count in sorted(record.staleness.items()))
        self._text = (
            f"step {last.step}/{self._wish.steps}  reward {record.recent_reward:.2f}  loss {last.loss:+.3f}  "
            f"version {last.version}  staleness {staleness}  {record.tokens_per_second:.0f} tokens/s  "
            f"trainer waits {record.idle_fraction:.0%}  {last.example}"
        )
        every = max(1, self._wish.steps // 20)
        if last.step % every == 0 or last.step == self._wish.steps:
            self.say(self._text)
