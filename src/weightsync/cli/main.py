"""``weightsync``: the commands and their options. What they do is in the modules that they import when they run.

Help must not wait for a tensor library, so nothing heavy is imported up here.
"""

from __future__ import annotations

import importlib
import importlib.util
import json as jsonlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.errors import Group
from weightsync.cli.help import Command
from weightsync.cli.logs import Level, LogJson, LogLevel, configure_logs
from weightsync.cli.options import CaFile, Coordinator, Json, JsonLast, Pausing, TokenFile, client_settings, parse_size, token_in
from weightsync.cli.push import push

__all__ = ["app", "main"]

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("weightsync"))
        except PackageNotFoundError:
            typer.echo("unknown (not installed)")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Get a trainer's new weights into serving engines: fast, verified, never torn.

    **Start here**

    `weightsync doctor` says what this machine can do.

    **In a run**

    `weightsync serve` is the coordinator that trainers and engines connect to; `weightsync status --watch` shows who serves
    which version; `weightsync round` brings replicas that fell behind up to date.
    """


@app.command(cls=Command)
def serve(
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address to listen on; another than loopback needs a token [env: WEIGHTSYNC_HOST; default 127.0.0.1].",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="Port; 0 takes a free one [env: WEIGHTSYNC_PORT; default 7400]."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Id of the run, part of every version's name [env: WEIGHTSYNC_RUN; default: a new one]."),
    ] = None,
    token_file: TokenFile = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="PATH",
            help="Serve https with this certificate chain (PEM) [env: WEIGHTSYNC_TLS_CERTIFICATE].",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The certificate's key (PEM) [env: WEIGHTSYNC_TLS_KEY].")
    ] = None,
    pause_mode: Annotated[
        Pausing | None,
        typer.Option(
            metavar="MODE",
            help="Running requests in an update: `abort`, `wait` or `keep` them [env: WEIGHTSYNC_PAUSE_MODE; default abort].",
        ),
    ] = None,
    round_deadline: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Seconds that a round may take [env: WEIGHTSYNC_ROUND_DEADLINE; default 600]."),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT",
            help="Replicas that a round needs to succeed: `all`, `any`, or a number [env: WEIGHTSYNC_REQUIRE; default any].",
        ),
    ] = None,
    max_unavailable: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Replicas that a round takes out of service at a time [env: WEIGHTSYNC_MAX_UNAVAILABLE; default all].",
        ),
    ] = None,
    log_level: LogLevel = Level.info,
    log_json: LogJson = False,
) -> None:
    """Run the coordinator: trainers and engines connect to it; no tensor ever passes through it.

    On one machine nothing else is needed: a token is made, and your own processes find it.

    ```
    weightsync serve
    ```

    For other machines, give all of them the same token:

    ```
    export WEIGHTSYNC_TOKEN=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')
    weightsync serve --host 0.0.0.0
    ```

    Ctrl-C ends it. It may be restarted at any time: agents come back, and engines keep serving meanwhile.
    """
    from weightsync.cli.serve import serve_forever

    configure_logs(log_level, log_json)
    serve_forever(
        host=host, port=port, run=run, token=token_in(token_file), tls_certificate=tls_certificate, tls_key=tls_key,
        pause_mode=None if pause_mode is None else pause_mode.value, round_deadline=round_deadline,
        require=require, max_unavailable=max_unavailable,
    )  # fmt: skip


@app.command(cls=Command)
def status(
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay, and show every change as it happens.")] = False,
) -> None:
    """Show who serves which version, how stale it is, and how the last rounds went.

    ```
    weightsync status
    weightsync status --watch -c http://head:7400
    weightsync status --json | jq '.replicas[] | select(.state != "loaded")'
    ```
    """
    from weightsync.cli.status import show

    show(client_settings(coordinator, token_file, ca_file), as_json=json, watch=watch)


@app.command("round", cls=Command)
def run_round(
    replica: Annotated[
        list[str] | None, typer.Argument(help="Names of the replicas; none means every replica that is not up to date.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for the whole round; default: the coordinator's own.")
    ] = None,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    json: Json = False,
) -> None:
    """Bring replicas to the version that is published now: after a failure, or for one that joined late.

    ```
    weightsync round
    weightsync round replica-1 --timeout 60
    ```

    Exits with 0 only if the round was ok.
    """
    from weightsync.cli.status import seed

    if not seed(client_settings(coordinator, token_file, ca_file), tuple(replica or ()), timeout, as_json=json):
        raise typer.Exit(1)


class TokenPart(StrEnum):
    """What ``weightsync token`` can print alone."""

    token = "token"
    source = "source"
    page = "page"


@app.command(cls=Command)
def token(
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    only: Annotated[
        TokenPart | None, typer.Option(help="Print only this: the token, the file or variable it comes from, or the link.")
    ] = None,
    json: Json = False,
) -> None:
    r"""Show a coordinator's token, where it comes from, and a link that opens the status page.

    Whoever has the token can replace the weights that your engines serve. Do not send it, or the link, to anybody else.

    ```
    weightsync token
    curl -H "Authorization: Bearer $(weightsync token --only token)" \
      http://127.0.0.1:7400/metrics
    ```
    """
    from weightsync.cli.token import show_token

    option = None if token_file is None else str(token_file)
    part = None if only is None else only.value
    show_token(client_settings(coordinator, token_file, None), option, part=part, as_json=json)


@app.command(cls=Command)
def revoke(
    member: Annotated[str, typer.Argument(help="The rank, as in `weightsync status --json`: `trainer/0`, `vllm-0/1`.")],
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    json: Json = False,
) -> None:
    """Send one rank away, so that another process can take its place.

    ```
    weightsync revoke trainer/0
    ```

    Its connection is closed and its process is refused until it is started again. Who has the token can join anew: after a theft
    restart the coordinator with another token.
    """
    from weightsync.cli.status import send_away

    send_away(client_settings(coordinator, token_file, ca_file), member, as_json=json)


@app.command(cls=Command)
def doctor(coordinator: Coordinator = None, token_file: TokenFile = None, ca_file: CaFile = None, json: Json = False) -> None:
    """Check this machine and the coordinator, and report what is missing with its impact. Changes nothing.

    ```
    weightsync doctor
    weightsync doctor -c http://head:7400
    weightsync doctor --json | jq '.checks[] | select(.status != "ok")'
    ```
    """
    import msgspec

    from weightsync.cli.doctor import examine

    findings = examine(client_settings(coordinator, token_file, ca_file))
    if json:
        typer.echo(jsonlib.dumps({"checks": msgspec.to_builtins(findings)}))
        return
    from weightsync.cli.tables import doctor_table, show_table

    show_table(doctor_table(findings))


@app.command(cls=Command)
def bench(
    suite: Annotated[
        str, typer.Option(help="`cpu`: all of these; `plan`: planning; `transfer`: rounds; `gpu`: rounds on GPUs.")
    ] = "cpu",
    size: Annotated[str, typer.Option(help="Bytes of the model.")] = "1GiB",
    tensors: Annotated[int, typer.Option(min=0, help="Only cases with so many tensors; 0 means all.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Only cases whose name contains this; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to measure, after the one that sets up.")] = 5,
    model: Annotated[str, typer.Option(help="`gpu`: `qwen3-8b`, `qwen3-30b-a3b`, or a path to a config.json.")] = "qwen3-8b",
    source: Annotated[str, typer.Option(help="`gpu`: trainer ranks, `fsdp=N`.")] = "fsdp=1",
    target: Annotated[str, typer.Option(help="`gpu`: engine ranks, `tp=N`.")] = "tp=1",
    placement: Annotated[str, typer.Option(help="`gpu`: `separate` GPUs, or the same: `colocated`.")] = "colocated",
    delivery: Annotated[str, typer.Option(help="`gpu`: `direct` or `streamed`; both if not given.")] = "",
    transport: Annotated[str, typer.Option(help="`gpu`: `cuda_ipc`, or `nccl` to other GPUs.")] = "cuda_ipc",
    bucket: Annotated[str, typer.Option(help="`gpu`, streamed: one staging buffer; from the free memory if not given.")] = "",
    buffers: Annotated[int, typer.Option(min=1, max=2, help="`gpu`, streamed: how many.")] = 2,
    json: JsonLast = False,
) -> None:
    """Measure whole rounds against the copies that cannot be avoided, in the same run.

    ```
    weightsync bench
    weightsync bench --only shared_memory/direct --size 256MiB --tensors 300
    weightsync bench --suite gpu --model qwen3-30b-a3b --source fsdp=4 --target tp=4 --placement colocated
    weightsync bench --json | tail -1 | jq '.cases[] | {name, ratio}'
    ```
    """
    with _needs("pip install . in a clone of weightsync"):
        options = importlib.import_module("weightsync.bench.options").BenchOptions(
            suite=suite, size=parse_size(size), tensors=tensors, only=tuple(only or ()), rounds=rounds, json=json,
            model=model, source=source, target=target, placement=placement, delivery=delivery,
            transport=transport, bucket_bytes=parse_size(bucket) if bucket else 0, buffers=buffers,
        )  # fmt: skip
        run = importlib.import_module("weightsync.bench.main").run
    raise typer.Exit(int(run(options) or 0))


app.command(cls=Command)(push)


@contextmanager
def _needs(hint: str) -> Iterator[None]:
    """A missing package becomes an error that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        from weightsync.errors import ConfigurationError

        raise ConfigurationError(f"this command needs {error.name!r}, which is not installed: {hint}") from None


def main() -> None:
    """Entry point of ``python -m weightsync``; the ``weightsync`` command calls :data:`app` itself."""
    app()
