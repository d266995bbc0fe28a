"""The commands ``weightsync bench`` and ``weightsync plan``.

Help must not wait for a tensor library, so each command imports what it runs.
"""

from __future__ import annotations

import io
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.options import Json, JsonLast, parse_size

_PICTURE_WIDTH = 110
_PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" class="rich-terminal" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""The template for Rich, without the fonts that it would fetch."""


class PlacementOption(StrEnum):
    """Where engines are."""

    separate = "separate"
    shared = "shared"
    colocated = "colocated"


def bench(
    suite: Annotated[
        str, typer.Option(help="`cpu`: all CPU cases; `plan`: planning; `transfer`: rounds; `gpu`: rounds on GPUs.")
    ] = "cpu",
    size: Annotated[str, typer.Option(help="Bytes of the model.")] = "1GiB",
    tensors: Annotated[int, typer.Option(min=0, help="Only cases with this number of tensors; 0 means all.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Only cases whose name contains this text; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to measure, after a first one for setup.")] = 5,
    runs: Annotated[int, typer.Option(min=1, help="How often to run the cases: also prints medians and ranges of the runs.")] = 1,
    model: Annotated[str, typer.Option(help="`gpu`: `qwen3-8b`, `qwen3-30b-a3b`, or a path to a config.json.")] = "qwen3-8b",
    source: Annotated[str, typer.Option(help="`gpu`: trainer ranks, `fsdp=N`.")] = "fsdp=1",
    target: Annotated[str, typer.Option(help="`gpu`: engine ranks, `tp=N`.")] = "tp=1",
    placement: Annotated[str, typer.Option(help="`gpu`: GPUs of trainer and engine: `separate` or `colocated`.")] = "colocated",
    delivery: Annotated[str, typer.Option(help="`gpu`: `direct` or `streamed`; both if not given.")] = "",
    transport: Annotated[str, typer.Option(help="`gpu`: `cuda_ipc`, `nixl`, or `nccl` to other GPUs.")] = "cuda_ipc",
    bucket: Annotated[str, typer.Option(help="`gpu`, streamed: size of a staging buffer; by default chosen by free memory.")] = "",
    buffers: Annotated[int, typer.Option(min=1, max=2, help="`gpu`, streamed: number of staging buffers.")] = 2,
    masters: Annotated[bool, typer.Option("--masters", help="`gpu`: float32 in the trainer, published as bfloat16.")] = False,
    json: JsonLast = False,
) -> None:
    r"""Measure whole rounds, and in the same run the copies that no implementation can avoid.

    ```
    weightsync bench
    weightsync bench --only shared_memory/direct --size 256MiB --tensors 300
    weightsync bench --suite transfer --only direct --runs 5
    weightsync bench --suite gpu --model qwen3-30b-a3b \
      --source fsdp=4 --target tp=4 --placement colocated
    weightsync bench --json | tail -1 | jq '.cases[] | {name, ratio}'
    ```
    """
    from weightsync_bench.main import run
    from weightsync_bench.options import BenchOptions

    options = BenchOptions(
        suite=suite, size=parse_size(size), tensors=tensors, only=tuple(only or ()), rounds=rounds, runs=runs, json=json,
        model=model, source=source, target=target, placement=placement, delivery=delivery,
        transport=transport, bucket_bytes=parse_size(bucket) if bucket else 0, buffers=buffers,
        masters=masters,
    )  # fmt: skip
    raise typer.Exit(int(run(options) or 0))


def plan(
    model: Annotated[
        str, typer.Argument(help="Path of a config.json, or `kimi-k2`, `deepseek-v3`, `qwen3-30b-a3b` and others.", metavar="MODEL")
    ],
    source: Annotated[
        str, typer.Option(metavar="MESH", help="Trainer: `fsdp=64`, `pp=8,ep=32`, `tp=8,pp=8,ep=32,dp=4`.")
    ] = "fsdp=8",
    target: Annotated[str, typer.Option(metavar="MESH", help="Engines: `tp=16,replicas=16`, `tp=8,ep=8`.")] = "tp=8",
    dtype: Annotated[str, typer.Option(help="Element type that is published, as torch calls it.")] = "bfloat16",
    placement: Annotated[
        PlacementOption,
        typer.Option(help="Engines on separate hosts (`separate`), on the trainer's (`shared`), or on its GPUs (`colocated`)."),
    ] = PlacementOption.separate,
    nic: Annotated[float, typer.Option(metavar="GBITS", help="NIC of one GPU in Gb/s, one direction.")] = 400.0,
    nvlink: Annotated[float, typer.Option(metavar="GBYTES", help="NVLink of one GPU in GB/s, one direction.")] = 396.0,
    host_gpus: Annotated[int, typer.Option(min=1, max=1024, help="GPUs of one host.")] = 8,
    svg: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also write a picture: bars by link, for every transport.")
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Also show stages, memory and links.")] = False,
    json: Json = False,
) -> None:
    r"""Forecast an update: bytes by link, seconds by stage, memory, and what to change first. Needs no GPU.

    ```
    weightsync plan kimi-k2 --source pp=8,ep=32 --target tp=16,replicas=16 --nic 400
    weightsync plan qwen3-30b-a3b \
      --source fsdp=4 --target tp=4 --placement colocated
    weightsync plan ./config.json --source fsdp=64 \
      --target tp=8,ep=8,replicas=4 --svg update.svg
    weightsync plan kimi-k2 --source pp=8,ep=32 --json | jq '.changes[0]'
    ```

    A mesh is a product: `fsdp`, `tp`, `pp` cut the model, `replicas` (or `dp`) are whole copies. With `ep`, whole experts are
    spread over the ranks of a pipeline stage.

    A transfer takes as long as its busiest link. Between hosts the time is calibrated on what other systems published; how well
    that works is in docs/benchmarks/forecast.md.
    """
    import msgspec

    from weightsync.cli.tables import show
    from weightsync_bench.forecast.forecast import Scenario, forecast_refit
    from weightsync_bench.forecast.mesh import Mesh
    from weightsync_bench.forecast_view import forecast_view, links_view
    from weightsync_bench.shapes import read_configuration

    scenario = Scenario(
        model=read_configuration(model), source=Mesh.parse(source), target=Mesh.parse(target), dtype=dtype, nic=nic, nvlink=nvlink,
        host_gpus=host_gpus, placement=placement.value,
    )  # fmt: skip
    forecast = forecast_refit(scenario)
    if svg is not None:
        from rich.console import Console

        from weightsync.errors import ConfigurationError

        console = Console(record=True, width=_PICTURE_WIDTH, file=io.StringIO())
        console.print(links_view([transport for transport in forecast.transports if not transport.unusable]))
        try:
            svg.write_text(console.export_svg(title=f"{model}: {source} to {target}", code_format=_PICTURE), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {str(svg)!r}: {error.strerror or error}") from None
    transports = [
        {**msgspec.to_builtins(transport), **({} if transport.unusable else {"pause": transport.pause})}
        for transport in forecast.transports
    ]
    answer = {**msgspec.to_builtins(forecast), "transports": transports}
    show(answer, lambda _: forecast_view(forecast, details=details), as_json=json)
