"""Commands and options of ``weightsync``. Each command's code is in a module that it imports when it runs.

Help must not wait for a tensor library, so this module imports nothing heavy.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from pathlib import Path
from typing import Annotated, Literal

import typer

from weightsync import __version__
from weightsync.cli import options
from weightsync.cli.commands import Command, CommandGroup
from weightsync.cli.options import CaFile, Coordinator, Json, TokenFile, client_settings, setting
from weightsync.cli.store import store_app
from weightsync.distributions import how_to_install

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_BESIDE = {
    "weightsync_bench": {"bench": "Measure whole rounds on this machine.", "plan": "Forecast an update of your model."},
    "weightsync_disaggregated": {"push": "Update running servers from a checkpoint on disk, without a trainer."},
    "weightsync_relay": {"relay": "Publish each new version of a store to the replicas of another region."},
}
"""Commands of other distributions, and their help where these are not installed."""
_TO_REQUESTS = "What an update does to running requests, unless the trainer decides"


def add_commands_beside(app: typer.Typer) -> None:
    """Add the commands of other distributions to ``app``, or where one is not installed, commands that say how to install it.

    Each distribution has its commands in the module ``commands``, whose ``COMMAND_CLASS``, if there is one, is their class.
    """
    for package, commands in _BESIDE.items():
        installed = importlib.util.find_spec(package) is not None
        module = importlib.import_module(f"{package}.commands") if installed else None
        for name, does in commands.items():
            if installed:
                app.command(name, cls=getattr(module, "COMMAND_CLASS", Command))(getattr(module, name))
                continue
            text = f"{does} Not installed: {how_to_install(package)}."
            app.command(name, cls=Command, help=text, context_settings={"ignore_unknown_options": True})(_not_installed)


def _not_installed(context: typer.Context, arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    from weightsync.errors import ConfigurationError

    package = next(package for package, commands in _BESIDE.items() if context.info_name in commands)
    named = package.replace("_", "-")
    raise ConfigurationError(f"`weightsync {context.info_name}` needs the package {named}: {how_to_install(package)}")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Deliver a trainer's new weights to serving engines: fast, verified, never torn.

    **Start here**

    `weightsync doctor` checks what this machine supports. `weightsync plan` forecasts what an update of your model would take.

    **In a run**

    `weightsync serve` runs the coordinator to which trainers and engines connect. `weightsync status --watch` shows which version
    each replica serves. `weightsync update` updates replicas that fell behind. `weightsync rounds` lists past rounds, and
    `weightsync trace` shows where the time of one went.
    """


@app.command(cls=Command)
def serve(
    host: Annotated[str | None, setting("HOST", "Address to listen on; any but loopback requires a token", "127.0.0.1")] = None,
    port: Annotated[int | None, setting("PORT", "Port; 0 selects a free one", "7400")] = None,
    run: Annotated[str | None, setting("RUN", "Id of the run, part of every version's label", "a new one", "ID")] = None,
    token_file: options.ServedTokenFile = None,
    operator_token_file: options.ServedOperatorTokenFile = None,
    tls_certificate: Annotated[
        Path | None, setting("TLS_CERTIFICATE", "Serve https with this chain (PEM)", None, "PATH", "--tls-cert")
    ] = None,
    tls_key: Annotated[Path | None, setting("TLS_KEY", "Key of the certificate (PEM)", None)] = None,
    pause_mode: Annotated[options.Pausing | None, setting("PAUSE_MODE", _TO_REQUESTS, "abort")] = None,
    round_deadline: Annotated[float | None, setting("ROUND_DEADLINE", "Time limit of a round in seconds", "600", "SECONDS")] = None,
    mount: Annotated[list[str] | None, setting("MOUNTS", "Routes to add, for example `rollouts`", "none", "NAME")] = None,
    require: Annotated[
        str | None, setting("REQUIRE", "Replicas that must succeed in a round: `all`, `any`, or a number", "any", "COUNT")
    ] = None,
    max_unavailable: Annotated[
        int | None, setting("MAX_UNAVAILABLE", "Replicas that may be out of service at the same time", "all", "COUNT")
    ] = None,
    state_dir: Annotated[
        str | None,
        setting("STATE_DIR", "Folder of the history of rounds; `off` keeps it in memory", "the user's state folder", "PATH"),
    ] = None,
    log_level: options.LogLevel = "info",
    log_json: options.LogJson = False,
) -> None:
    """Run the coordinator. Trainers and engines connect to it; no tensor passes through it.

    On one machine nothing else is needed: a token is generated, and your own processes find it.

    ```
    weightsync serve
    ```

    For several machines, set the same token on all of them:

    ```
    export WEIGHTSYNC_TOKEN=$(weightsync token --new)
    weightsync serve --host 0.0.0.0
    ```

    Ctrl-C stops it. You can restart it at any time: agents reconnect, and engines keep serving while it is down.
    """
    from weightsync.cli.serve import serve_forever

    options.configure_logs(log_level, log_json)
    serve_forever(
        host=host, port=port, run=run, token=options.token_in(token_file),
        operator_token=options.token_in(operator_token_file, "--operator-token-file"), tls_certificate=tls_certificate,
        tls_key=tls_key, pause_mode=pause_mode, round_deadline=round_deadline,
        require=require, max_unavailable=max_unavailable, mounts=tuple(mount) if mount else None, state_dir=state_dir,
    )  # fmt: skip


@app.command(cls=Command)
def status(
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep running and print every event.")] = False,
) -> None:
    """Show which version each replica serves, how stale it is, and how the last rounds went.

    ```
    weightsync status
    weightsync status --watch -c http://head:7400
    weightsync status --json | jq '.replicas[] | select(.service != "serving")'
    ```
    """
    from weightsync.cli.status import show_status

    show_status(client_settings(coordinator, token_file, ca_file), as_json=json, watch=watch)


@app.command(cls=Command)
def replicas(
    wait: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Wait until replicas serve this version (`run@7`) or a later one.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="How many replicas must serve it; by default all that are known.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait, in seconds.")] = 600.0,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    json: Json = False,
) -> None:
    """List which version each replica serves, or wait until they serve one.

    ```
    weightsync replicas
    weightsync replicas --wait run-1a2b@7 --timeout 60 && start-evaluation
    weightsync replicas --wait run-1a2b@7 --count 2 --json
    ```

    The exit status is 0 if they serve it, 1 if the time has passed (the message says what each of the others does), 2 for a version
    of another run, and 3 if no coordinator answered.
    """
    from weightsync.cli.status import list_replicas, wait_until_served

    if not timeout > 0:
        raise typer.BadParameter("--timeout must be more than 0 seconds")
    settings = client_settings(coordinator, token_file, ca_file)
    if wait is None:
        list_replicas(settings, as_json=json)
    else:
        wait_until_served(settings, wait, count, timeout, as_json=json)


@app.command("round", cls=Command, hidden=True)  # the earlier name, one letter from `rounds`
@app.command(cls=Command)
def update(
    replica: Annotated[
        list[str] | None, typer.Argument(help="Names of the replicas; by default every replica that is not up to date.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time limit of the round in seconds; default: the coordinator's.")
    ] = None,
    coordinator: Coordinator = None,
    operator_token_file: options.OperatorTokenFile = None,
    ca_file: CaFile = None,
    json: Json = False,
) -> None:
    """Update replicas to the version that is published now, after a failure or a late join.

    ```
    weightsync update
    weightsync update replica-1 --timeout 60
    ```

    This needs the operator's token, which no worker has. The exit status is 0 only if the round succeeded.
    """
    from weightsync.cli.status import seed

    if timeout is not None and not timeout > 0:
        raise typer.BadParameter("--timeout must be more than 0 seconds")
    settings = client_settings(coordinator, None, ca_file)
    if not seed(settings, options.operator_in(operator_token_file, settings), tuple(replica or ()), timeout, as_json=json):
        raise typer.Exit(1)


@app.command(cls=Command)
def rounds(
    last: Annotated[int, typer.Option(min=1, max=10000, metavar="COUNT", help="How many rounds to list.")] = 20,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="List the rounds of this run only.")] = None,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    json: Json = False,
) -> None:
    """List the last rounds: what each moved, how fast, and which phase at which rank took longest.

    The coordinator keeps the last 10,000 rounds of a user in its state folder, of all runs and also across restarts. If the listed
    rounds are of several runs, a column says of which.

    ```
    weightsync rounds
    weightsync rounds --run run-1a2b
    weightsync rounds --last 500 --json | jq '.[] | select(.ok | not) | .error'
    ```
    """
    from weightsync.cli.rounds import list_rounds

    list_rounds(client_settings(coordinator, token_file, ca_file), last, run, as_json=json)


@app.command(cls=Command)
def trace(
    number: Annotated[int | None, typer.Argument(min=1, metavar="ROUND", help="Number of the round; by default the last.")] = None,
    last: Annotated[bool, typer.Option("--last", help="The last round; the default.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PATH", help="File to write.")] = Path("round.json"),
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Write what every process did in a round, on one clock, for Perfetto or Chrome.

    ```
    weightsync trace --last --out round.json
    ```

    Open the file at https://ui.perfetto.dev. The coordinator keeps the last 16 rounds.
    """
    from weightsync.cli.rounds import write_trace

    if last and number is not None:
        raise typer.BadParameter("give a round or --last, not both")
    write_trace(client_settings(coordinator, token_file, ca_file), number, out)


@app.command(cls=Command)
def token(
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    only: Annotated[
        Literal["token", "source", "page", "operator", "metrics"] | None,
        typer.Option(help="Print only one part: a token, the file or variable that holds the first one, or the link."),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Print a new random token, and ask no coordinator.")] = False,
    adapters: Annotated[
        str | None,
        typer.Option(
            help="Print a token that admits to publishing these adapters, and to nothing else: `alice/*`.", metavar="NAMES"
        ),
    ] = None,
    json: Json = False,
) -> None:
    r"""Show a coordinator's tokens, their sources, and a link that opens the status page.

    Anyone with the first token can replace the weights that your engines serve. Do not share it or the link. `operator` is for
    `weightsync update` and `weightsync revoke`: give it to no worker. `metrics` admits to `/metrics` only.

    ```
    weightsync token
    curl -H "Authorization: Bearer $(weightsync token --only metrics)" \
      http://127.0.0.1:7400/metrics
    ```
    """
    from weightsync.cli.token import show_limited_token, show_token

    if new:
        return typer.echo(secrets.token_urlsafe(32))
    option = None if token_file is None else str(token_file)
    if adapters is not None:
        return show_limited_token(client_settings(coordinator, token_file, None), option, adapters)
    show_token(client_settings(coordinator, token_file, None), option, part=only, as_json=json)


@app.command(cls=Command)
def revoke(
    member: Annotated[str, typer.Argument(help="The rank, as in `weightsync status --json`: `trainer/0`, `vllm-0/1`.")],
    coordinator: Coordinator = None,
    operator_token_file: options.OperatorTokenFile = None,
    ca_file: CaFile = None,
    json: Json = False,
) -> None:
    """Disconnect one rank, so that another process can take its place.

    ```
    weightsync revoke trainer/0
    ```

    This needs the operator's token, which no worker has. The rank's connection is closed, and its process is refused until it is
    restarted. A process with the token can still join, so after a theft restart the coordinator with a new token.
    """
    from weightsync.cli.status import send_away

    settings = client_settings(coordinator, None, ca_file)
    send_away(settings, options.operator_in(operator_token_file, settings), member, as_json=json)


@app.command(cls=Command)
def doctor(coordinator: Coordinator = None, token_file: TokenFile = None, ca_file: CaFile = None, json: Json = False) -> None:
    """Check this machine and the coordinator, and report absent capabilities with their impact. Changes nothing.

    ```
    weightsync doctor
    weightsync doctor -c http://head:7400
    weightsync doctor --json | jq '.checks[] | select(.status != "ok")'
    ```
    """
    from weightsync.cli.doctor import examine
    from weightsync.cli.tables import doctor_table, show

    findings = examine(client_settings(coordinator, token_file, ca_file))
    show({"checks": findings}, lambda _: doctor_table(findings), as_json=json)


add_commands_beside(app)
app.add_typer(store_app, name="store")


def main() -> None:
    """Entry point of ``python -m weightsync``. The ``weightsync`` command calls :data:`app` directly."""
    app()
