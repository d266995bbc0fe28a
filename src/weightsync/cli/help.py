"""Help texts: flags without a value, and examples without the empty lines that Rich puts around code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperCommand


class _Example(CodeBlock):
    """Command lines, indented by two spaces."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Padding(Text(str(self.text).rstrip(), style="cyan"), (0, 0, 0, 2))


@contextmanager
def _examples() -> Iterator[None]:
    # Typer makes the Markdown objects itself, so the element is replaced for all of them while help is printed.
    kept = Markdown.elements
    Markdown.elements = {**kept, "fence": _Example}
    try:
        yield
    finally:
        Markdown.elements = kept


class HelpTexts:
    """Mixin of the group and of every command, before Typer's class."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - click's own types have moved between packages
        """Parameters, with flags shown without a value: ``--json``, not ``--json <bool>``."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Print the help."""
        with _examples():
            super().format_help(ctx, formatter)  # type: ignore[misc]


class Command(HelpTexts, TyperCommand):
    """A command of ``weightsync``."""
