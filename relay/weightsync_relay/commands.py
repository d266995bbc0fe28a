"""``weightsync relay``: publish the versions of a store to replicas far from the trainer."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from typing import Annotated

import typer

from weightsync.cli.commands import EXIT_INTERRUPTED
from weightsync.cli.options import LogJson, LogLevel, TokenFile, configure_logs, setting, token_in
from weightsync.cli.store import OfRun, OpenedStore, PublicKey, StoreCommand, StoreUrl

COMMAND_CLASS = StoreCommand
"""Ctrl-C ends it at once while it opens the store."""
_OR = ", or WEIGHTSYNC_COORDINATOR. Without either, it runs in this process."


def relay(
    store: StoreUrl = None,
    run: OfRun = None,
    key: PublicKey = None,
    coordinator: Annotated[
        str | None, typer.Option("--coordinator", "-c", metavar="URL", help=f"URL of the replicas' coordinator{_OR}")
    ] = None,
    token_file: TokenFile = None,
    interval: Annotated[float | None, setting("STORE_INTERVAL", "Seconds between two looks at the store", "10", "SECONDS")] = None,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit for reading one version.")] = 3600.0,
    deltas: Annotated[
        bool, typer.Option("--deltas", help="Let replicas read only words that changed; takes a third copy of the model.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Publish the newest version and exit. Needs a coordinator that stays.")
    ] = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    r"""Publish each new version of a store to the replicas of another region: verified, and under the same label.

    It has no model. It keeps the newest version in host memory (two copies), and engines read it from there. Without
    `--coordinator` the coordinator of these engines runs in this process, with the settings of `weightsync serve`.

    ```
    weightsync relay --store s3://bucket/versions --run my-run \
      --key "$(cat run.key)"
    ```

    Ctrl-C stops it. Engines serve on, and the next relay goes on from there. With `--once`, the exit status is 0 only if the round
    succeeded.
    """
    from msgspec import structs

    from weightsync.config import ClientSettings, ServerSettings, variable
    from weightsync.errors import ConfigurationError, CoordinatorUnreachable
    from weightsync.server.server import BackgroundServer
    from weightsync_relay.relay import Relay

    configure_logs(log_level, log_json)
    opened, token = OpenedStore(store, run, key), token_in(token_file)
    url, secret = coordinator or variable("WEIGHTSYNC_COORDINATOR"), None if token is None else token.reveal()
    seconds = ClientSettings.load(store_interval=interval).store_interval
    if once and not url:
        raise ConfigurationError("--once leaves no coordinator behind: run `weightsync serve`, and give its --coordinator")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        with ExitStack() as owned:
            if not url:
                # It has no key to sign with, and needs no store: late replicas read from this process.
                settings = ServerSettings.load(None, {"WEIGHTSYNC_REQUIRE": "0"}, run=opened.run, token=token)
                server = owned.enter_context(BackgroundServer(structs.replace(settings, store=None, store_key=None)))
                url, secret = server.url, server.token
                typer.echo(f"coordinator of run {opened.run} at {url}")
            relay = Relay(
                opened.store, opened.run, opened.public, url, token=secret, deltas=deltas, interval=seconds, timeout=timeout
            )
            owned.enter_context(relay).follow(once=once)
    except CoordinatorUnreachable as error:
        if coordinator or not variable("WEIGHTSYNC_COORDINATOR"):
            raise
        unset = "WEIGHTSYNC_COORDINATOR is set, so this relay starts no coordinator; unset it to have one here"
        raise CoordinatorUnreachable(f"{error}. {unset}") from None
    except KeyboardInterrupt:
        typer.echo("relay stopped")
        if once:
            raise typer.Exit(EXIT_INTERRUPTED) from None
