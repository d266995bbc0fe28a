"""``weightsync push``: update running servers from a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weightsync.cli.options import Json, Pausing, parse_size, token_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_disaggregated.clients.base import UpdateClient


EngineKind = Literal["weightsync", "sglang", "lmdeploy", "vllm"]
"""Routes that the servers implement."""


def push(
    checkpoint: Annotated[Path, typer.Argument(help="Directory with a safetensors checkpoint, sharded or not, or one file.")],
    to: Annotated[list[str], typer.Option(metavar="URL", help="A server to update; may be repeated.")],
    engine: Annotated[EngineKind, typer.Option(help="Routes of the servers; `weightsync` and `vllm` verify every tensor.")],
    label: Annotated[str | None, typer.Option(help="Version's label: a number, or RUN@NUMBER. Needed with sglang, vllm.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Engine ranks behind each URL (tensor times pipeline parallel).")] = 1,
    backend: Annotated[Literal["nccl", "gloo"], typer.Option(help="Transfer backend; `nccl` needs a local GPU.")] = "nccl",
    group: Annotated[str, typer.Option(help="Name of the process group.")] = "weightsync",
    address: Annotated[
        str | None, typer.Option(help="This machine's address as seen by the servers [default: by the route to each].")
    ] = None,
    pause_mode: Annotated[Pausing, typer.Option(help="What happens to running requests.")] = "abort",
    bucket: Annotated[str, typer.Option(help="Size of a bucket; two are held in memory.")] = "256MiB",
    timeout: Annotated[float, typer.Option(min=1, help="Time limit of the whole update in seconds.")] = 3600.0,
    step_timeout: Annotated[float, typer.Option(min=1, help="Time limit of one bucket or request in seconds.")] = 300.0,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Follow links in the checkpoint, also to files outside its directory.")
    ] = False,
    allow_sparse: Annotated[
        bool, typer.Option("--allow-sparse", help="Also read sparse files, which are far larger than their stored data.")
    ] = False,
    token_file: Annotated[Path | None, typer.Option(help="File with the servers' API key.")] = None,
    json: Json = False,
) -> None:
    r"""Update running servers from a checkpoint on disk, without a trainer.

    Reads a bucket at a time, sends it to all servers concurrently, and prints the outcome of each server. A server is paused only
    after the first bucket has been read and, with `weightsync` and `vllm`, the server has compared the checkpoint with its model. A
    server that fails after that is not resumed: push again. The exit status is 0 only if all servers are updated. With `--engine
    vllm` a draft model keeps its weights, because vLLM loads it in a separate session from a checkpoint that is not pushed; rounds
    from a trainer update both.

    ```
    weightsync push ./step-400 --to http://head:30000 \
      --engine sglang --label 400 --ranks 8
    weightsync push ./step-400 --to http://a:8000 --to http://b:8000 \
      --engine weightsync --backend gloo --json
    ```
    """
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from weightsync.errors import ConfigurationError
    from weightsync.external.checkpoint_files import CheckpointFiles
    from weightsync_disaggregated.clients.lmdeploy import LMDeployClient
    from weightsync_disaggregated.clients.sglang import SGLangClient
    from weightsync_disaggregated.clients.vllm import VLLMClient
    from weightsync_disaggregated.clients.weightsync import WeightUpdateClient
    from weightsync_disaggregated.push import push as push_all

    kinds: dict[EngineKind, Callable[..., UpdateClient]] = {
        "weightsync": WeightUpdateClient, "sglang": SGLangClient, "lmdeploy": LMDeployClient, "vllm": VLLMClient,
    }  # fmt: skip
    if len(set(to)) != len(to):
        raise ConfigurationError("--to names a server twice")
    if engine in ("sglang", "vllm") and label is None:
        raise ConfigurationError("SGLang and vLLM need a version label: give --label")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigurationError("--backend nccl needs a GPU, but there is none; use --backend gloo if the servers support it")
    token = token_in(token_file)
    nbytes = parse_size(bucket)
    device = torch.device("cuda") if backend == "nccl" else None
    with ExitStack() as opened:
        source = opened.enter_context(CheckpointFiles(checkpoint, follow_links=follow_links, allow_sparse=allow_sparse))
        options = {"token": token, "group": group, "backend": backend, "ranks": ranks, "address": address, "device": device}
        clients = [opened.enter_context(kinds[engine](url, **options)) for url in to]
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        bar = opened.enter_context(Progress(*columns, console=Console(stderr=True), disable=json))
        sent = bar.add_task("push", total=source.manifest.nbytes)
        results = push_all(
            source, clients, label, mode=pause_mode, bucket_bytes=nbytes, timeout=timeout, step_timeout=step_timeout,
            progress=lambda nbytes: bar.advance(sent, nbytes),
        )  # fmt: skip
    ok = all(result.ok for result in results)
    if json:
        import msgspec

        summary = {
            "ok": ok,
            "nbytes": source.manifest.nbytes,
            "tensors": len(source.manifest),
            "servers": msgspec.to_builtins(results),
        }
        typer.echo(msgspec.json.encode(summary).decode())
    else:
        for result in results:
            typer.secho(f"{result.url}: {result.answer}", fg="green" if result.ok else "red", err=not result.ok)
            if result.touched and not result.ok:
                typer.secho("  the server was not resumed: push again, or restart it", fg="red", err=True)
    if not ok:
        raise typer.Exit(1)
