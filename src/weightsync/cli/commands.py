"""How commands print their help, and errors on one line: what happened, to whom, what to do. ``--debug`` adds the traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130


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


def exit_code(error: BaseException) -> int:
    """Exit status for scripts: 2 for a wrong setting or token, 3 if the coordinator does not answer, 1 for all other errors."""
    from weightsync.errors import AuthenticationError, ConfigurationError, CoordinatorUnreachable

    if isinstance(error, ConfigurationError | AuthenticationError):
        return EXIT_CONFIGURATION
    return EXIT_UNREACHABLE if isinstance(error, CoordinatorUnreachable) else EXIT_FAILED


class _Reported:
    """Prints weightsync's own errors on one line of standard error."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - click's type of this has moved between packages
        """Run a command.

        Raises:
            typer.Exit: The command failed. The status is that of :func:`exit_code`.
        """
        from weightsync.errors import WeightSyncError

        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except WeightSyncError as error:
            if ctx.params.get("debug"):
                raise
            typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            if ctx.params.get("debug"):
                raise
            raise typer.Exit(EXIT_INTERRUPTED) from None


class CommandGroup(_Reported, HelpTexts, TyperGroup):
    """A program with several commands."""


class Program(_Reported, HelpTexts, TyperCommand):
    """A program with one command."""
