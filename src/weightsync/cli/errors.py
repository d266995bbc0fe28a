"""Errors of commands on one line: what happened, to whom, what to do. ``--debug`` shows the traceback."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from weightsync.cli.help import HelpTexts

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130


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
