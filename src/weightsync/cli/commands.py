"""How commands print their help, and errors in one style: ``error:``, ``hint:``, ``see:``, or JSON with ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import EnumType
from typing import Any, Literal, get_args, get_origin

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

_Refused: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base of what the parser raises; it has moved between packages."""

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


def exit_code(error: BaseException) -> int:
    """Exit status for scripts: 2 for a wrong setting or token, 3 if no coordinator answers, 130 for Ctrl-C, 1 for other errors."""
    from weightsync.errors import AuthenticationError, ConfigurationError, CoordinatorUnreachable

    if isinstance(error, ConfigurationError | AuthenticationError):
        return EXIT_CONFIGURATION
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_UNREACHABLE if isinstance(error, CoordinatorUnreachable) else EXIT_FAILED


def _report(kind: str, text: str, see: str = "", *, as_json: bool) -> None:
    """Print an error: in lines to standard error, or as one JSON object to standard output, where the result would be."""
    from weightsync.errors import HINT, readable

    message, _, hint = text.partition(HINT)
    parts = {"message": message, "hint": hint, "see": see}
    if as_json:
        typer.echo(json.dumps({"error": {"kind": kind, **{name: part for name, part in parts.items() if part}}}))
        return
    console = Console(stderr=True, highlight=False)
    for name, part in zip(("error", "hint", "see"), parts.values(), strict=True):
        if part:
            line = Text.assemble((f"{name}: ", "bold red" if name == "error" else "bold"), readable(part))
            console.print(line, soft_wrap=not console.is_terminal)  # a line each in files and pipes


def choices_of(parameter: Any) -> Sequence[str]:  # noqa: ANN401 - Typer's
    """Values among which an option chooses; none if it takes any."""
    if not hasattr(parameter, "type_descriptor"):  # before Typer 0.29
        return tuple(getattr(parameter.type, "choices", ()))
    kind = parameter.type_descriptor.annotation
    return tuple(kind) if isinstance(kind, EnumType) else get_args(kind) if get_origin(kind) is Literal else ()


class _Styled:
    """Mixin that prints help and errors in one style. Before Typer's class, for programs and for every command."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - click's own types have moved between packages
        """Parameters, with flags shown without a value, and others with one word: ``--json``, ``--pause-mode MODE``."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif not parameter.metavar and parameter.param_type_name == "option":
                parameter.metavar = parameter.name.rpartition("_")[2].upper()
                if choices := choices_of(parameter):
                    parameter.help += f" One of {', '.join(choices)}."
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Print the help."""
        with _examples():
            super().format_help(ctx, formatter)  # type: ignore[misc]

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - click's type of this has moved between packages
        """Run a command.

        Raises:
            typer.Exit: The command failed. The status is that of :func:`exit_code`.
        """
        from weightsync.errors import WeightSyncError

        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except (WeightSyncError, KeyboardInterrupt) as error:
            if ctx.find_root().params.get("debug"):
                raise
            if isinstance(error, WeightSyncError):
                _report(type(error).__name__, str(error), as_json=bool(ctx.params.get("json")))
            raise typer.Exit(exit_code(error)) from None

    def main(self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # noqa: ANN401
        """Run the program, see :class:`click.Command`."""
        if not standalone_mode:
            return super().main(args, *more, standalone_mode=False, **extra)  # type: ignore[misc]
        try:
            sys.exit(super().main(args, *more, standalone_mode=False, **extra) or 0)  # type: ignore[misc]
        except typer.Abort:
            sys.exit(EXIT_FAILED)
        except _Refused as error:
            if not error.format_message():  # what was asked for is help
                error.show()
            else:
                see = f"{error.ctx.command_path} --help" if getattr(error, "ctx", None) else ""
                given = sys.argv[1:] if args is None else args
                words = error.format_message().replace("Value error, ", "")
                for theirs, ours in (("greater than or equal to", "at least"), ("less than or equal to", "at most")):
                    words = words.replace(f"Input should be {theirs}", f"it must be {ours}")
                _report("UsageError", words, see, as_json="--json" in given)
            sys.exit(error.exit_code)


class Command(_Styled, TyperCommand):
    """A command of ``weightsync``, or a program with one command."""


class CommandGroup(_Styled, TyperGroup):
    """A program with several commands."""
