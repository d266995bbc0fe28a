"""``python -m examples.demo``: the demo's command line."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.commands import Command
from weightsync.cli.options import JsonLast, Pausing
from weightsync.errors import ConfigurationError

app = typer.Typer(
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Transport(StrEnum):
    """Schemes that the demo can be told to use."""

    auto = "auto"
    shared_memory = "shared_memory"
    tcp = "tcp"


class DeliveryChoice(StrEnum):
    """How bytes reach an engine."""

    auto = "auto"
    direct = "direct"
    streamed = "streamed"


class EngineChoice(StrEnum):
    """Engines that the demo can start."""

    transformers = "transformers"
    vllm = "vllm"


class TrainerChoice(StrEnum):
    """How the demo can train."""

    fsdp = "fsdp"
    megatron = "megatron"


class Architecture(StrEnum):
    """Shapes of the demo's model."""

    llama = "llama"
    qwen2 = "qwen2"


class OptimizerChoice(StrEnum):
    """How the demo can optimize."""

    adamw = "adamw"
    muon = "muon"


class Part(StrEnum):
    """Which part of the demo runs here."""

    all = "all"
    trainer = "trainer"
    replica = "replica"
    client = "client"


_PARTS = "On several machines"


@app.command(cls=Command)
def demo(
    trainer: Annotated[TrainerChoice, typer.Option(help="FSDP2, or Megatron-core with tensor parallelism.")] = TrainerChoice.fsdp,
    trainer_ranks: Annotated[int, typer.Option(min=1, help="Processes that train, each with a part of the model.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, help="Serving replicas.")] = 2,
    versions: Annotated[int, typer.Option(min=1, help="Versions to publish.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps before each version.")] = 6,
    transport: Annotated[Transport, typer.Option(help="How bytes cross.")] = Transport.auto,
    delivery: Annotated[
        DeliveryChoice, typer.Option(help="Straight into parameters, or through the engine's own loader.")
    ] = DeliveryChoice.auto,
    engine: Annotated[EngineChoice, typer.Option(help="Which engine serves.")] = EngineChoice.transformers,
    engine_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of each replica; vllm only.")] = 1,
    model: Annotated[Architecture, typer.Option(help="Shape of the model.")] = Architecture.llama,
    tied: Annotated[bool, typer.Option("--tied/--untied", help="Whether the output head is tied to the embeddings.")] = True,
    pause_mode: Annotated[Pausing, typer.Option(help="What happens to running requests around an update.")] = "keep",
    optimizer: Annotated[OptimizerChoice, typer.Option(help="AdamW, or Muon for the layers' matrices.")] = OptimizerChoice.adamw,
    learning_rate: Annotated[float, typer.Option(help="Of the optimizer.")] = 4e-3,
    deltas: Annotated[
        bool,
        typer.Option("--deltas", help="Train float32 weights, publish bfloat16, move only what changed; all to the last replica."),
    ] = False,
    adapters: Annotated[int, typer.Option(min=0, help="LoRA adapters, published beside each version.")] = 0,
    keep: Annotated[int, typer.Option(min=1, help="Versions of each adapter that replicas go on serving.")] = 2,
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill a replica, a trainer rank and the coordinator in the middle of rounds.")
    ] = False,
    store: Annotated[Path | None, typer.Option(metavar="DIR", help="Store every version in this folder.")] = None,
    kill_trainer: Annotated[
        bool, typer.Option("--kill-trainer", help="End the trainer for good; another replica then joins from the store.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the data, the model and the requests.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which it gives up.")] = 600.0,
    json: JsonLast = False,
    token_file: Annotated[
        Path | None, typer.Option(help="Token of its coordinator, for the page and for `weightsync status`; else a new one.")
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(metavar="URL", help="Use this coordinator instead of starting one.", rich_help_panel=_PARTS)
    ] = None,
    role: Annotated[Part, typer.Option(help="Run only this part here.", rich_help_panel=_PARTS)] = Part.all,
    directory: Annotated[
        Path | None, typer.Option(help="Where checkpoints go; shared by all machines.", rich_help_panel=_PARTS)
    ] = None,
    host: Annotated[str, typer.Option(help="Address on which replicas serve completions.", rich_help_panel=_PARTS)] = "127.0.0.1",
    replica_prefix: Annotated[
        str, typer.Option(help="Replicas started here are named PREFIX-0, PREFIX-1, ...", rich_help_panel=_PARTS)
    ] = "replica",
    replica_url: Annotated[
        list[str] | None,
        typer.Option(help="For the client alone: a replica to send requests to; may be repeated.", rich_help_panel=_PARTS),
    ] = None,
) -> None:
    """Train a small language model while replicas serve it under traffic, and check every token that they gave.

    Needs no GPU. Exits with 0 only if no response was torn or mislabelled.

    ```
    python -m examples.demo
    python -m examples.demo --trainer-ranks 3 --replicas 3 --versions 5 --transport tcp --json
    python -m examples.demo --adapters 3
    python -m examples.demo --kill
    python -m examples.demo --store versions --kill-trainer
    ```
    """
    needed = ("transformers", "tokenizers", "safetensors", "weightsync_disaggregated")
    missing = next((name for name in needed if find_spec(name) is None), None)
    if missing:  # the processes that it starts import them
        raise ConfigurationError(
            f"the demo needs {missing!r}, which is not installed: pip install '.[demo]' ./disaggregated-updates in a clone of "
            "weightsync"
        )
    from examples.demo.main import run
    from examples.demo.settings import Settings

    settings = Settings(
        trainer="megatron" if trainer is TrainerChoice.megatron else "fsdp",
        trainer_ranks=trainer_ranks, replicas=replicas, versions=versions, steps=steps, transport=transport.value,
        delivery=delivery.value, engine="vllm" if engine is EngineChoice.vllm else "transformers",
        engine_tp=engine_tp, model=model.value, tied=tied,
        pause_mode=pause_mode, optimizer="muon" if optimizer is OptimizerChoice.muon else "adamw",
        learning_rate=learning_rate, deltas=deltas, adapters=adapters, keep=keep, kill=kill,
        store=None if store is None else str(store.resolve()), kill_trainer=kill_trainer,
        seed=seed, timeout=timeout, json=json, token_file=token_file,
        coordinator=coordinator, role=role.value,
        directory=directory, host=host, replica_prefix=replica_prefix, replica_urls=tuple(replica_url or ()),
    )  # fmt: skip
    raise typer.Exit(int(run(settings) or 0))


if __name__ == "__main__":
    app()
