"""``weightsync bench`` and ``weightsync plan``, which come with a separate package, ``weightsync-bench``."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated

import typer

from weightsync.cli.help import Command


def add_bench_commands(app: typer.Typer) -> None:
    """Add the package's commands to ``app``, or two that say how to install it."""
    if importlib.util.find_spec("weightsync_bench") is None:
        any_options = {"ignore_unknown_options": True}
        app.command(cls=Command, context_settings=any_options)(bench)
        app.command(cls=Command, context_settings=any_options)(plan)
        return
    commands = importlib.import_module("weightsync_bench.commands")
    app.command(cls=Command)(commands.bench)
    app.command(cls=Command)(commands.plan)


_Arguments = Annotated[list[str] | None, typer.Argument(hidden=True)]


def bench(arguments: _Arguments = None) -> None:
    """Measure whole rounds on this machine. Not installed: run `pip install ./bench` in a clone of weightsync."""
    raise _not_installed("bench")


def plan(arguments: _Arguments = None) -> None:
    """Forecast an update of your model. Not installed: run `pip install ./bench` in a clone of weightsync."""
    raise _not_installed("plan")


def _not_installed(command: str) -> Exception:
    from weightsync.errors import ConfigurationError

    return ConfigurationError(
        f"`weightsync {command}` needs the package weightsync-bench: run `pip install ./bench` in a clone of weightsync"
    )
