"""``weightsync plan``: a forecast of a refit, as tables, JSON, or a picture."""

from __future__ import annotations

import io
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.options import Json

__all__ = ["PlacementOption", "plan"]

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
        typer.Option(help="Engines on hosts of their own (`separate`), on the trainer's (`shared`), or on its GPUs (`colocated`)."),
    ] = PlacementOption.separate,
    nic: Annotated[float, typer.Option(metavar="GBITS", help="NIC of one GPU in Gb/s, one direction.")] = 400.0,
    nvlink: Annotated[float, typer.Option(metavar="GBYTES", help="NVLink of one GPU in GB/s, one direction.")] = 396.0,
    host_gpus: Annotated[int, typer.Option(min=1, max=1024, help="GPUs of one host.")] = 8,
    svg: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also write a picture: bars by link, for every transport.")
    ] = None,
    json: Json = False,
) -> None:
    """Forecast a refit: bytes by link, seconds by stage, memory, and what to change first. Needs no GPU.

    ```
    weightsync plan kimi-k2 --source pp=8,ep=32 --target tp=16,replicas=16 --nic 400
    weightsync plan qwen3-30b-a3b --source fsdp=4 --target tp=4 --placement colocated
    weightsync plan ./config.json --source fsdp=64 --target tp=8,ep=8,replicas=4 --svg refit.svg
    weightsync plan kimi-k2 --source pp=8,ep=32 --json | jq '.changes[0]'
    ```

    A mesh is a product: `fsdp`, `tp`, `pp` cut the model, `replicas` (or `dp`) are whole copies. With `ep`, whole experts are
    spread over the ranks of a pipeline stage.

    A transfer takes as long as its busiest link. Between hosts the time is calibrated on what other systems published; how well
    that works is in docs/benchmarks/forecast.md.
    """
    import msgspec

    from weightsync.bench.forecast.forecast import Scenario, forecast_refit
    from weightsync.bench.forecast.mesh import Mesh
    from weightsync.bench.shapes import read_configuration
    from weightsync.cli.tables import forecast_view, links_view, show

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
    show({**msgspec.to_builtins(forecast), "transports": transports}, lambda _: forecast_view(forecast), as_json=json)
