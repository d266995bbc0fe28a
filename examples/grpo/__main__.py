"""``python -m examples.grpo``: the options."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from examples.grpo.settings import Settings
from weightsync.errors import ConfigurationError

__all__ = ["main"]


class Mode(StrEnum):
    """When the trainer waits."""

    one_step_off = "one-step-off"
    asynchronous = "async"


class Engine(StrEnum):
    """Who generates."""

    demo = "demo"
    vllm = "vllm"


def main(
    mode: Annotated[Mode, typer.Option(help="One step off, or nobody waits for anybody.")] = Mode.asynchronous,
    staleness: Annotated[int | None, typer.Option(min=0, help="Versions that a token may be behind [default: 1 or 3].")] = None,
    engine: Annotated[Engine, typer.Option(help="A small sampler of our own, or vLLM's servers.")] = Engine.demo,
    replicas: Annotated[int, typer.Option(help="Servers.")] = 2,
    trainer_ranks: Annotated[int, typer.Option(help="1: a plain module; 2: FSDP2.")] = 1,
    steps: Annotated[int, typer.Option(help="Batches to learn from.")] = 200,
    groups: Annotated[int, typer.Option(help="Problems in a batch.")] = 8,
    group_size: Annotated[int, typer.Option(help="Answers to each problem.")] = 8,
    updates: Annotated[int, typer.Option(help="Optimizer steps on each batch.")] = 1,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 3e-4,
    warm_up: Annotated[int, typer.Option(help="Supervised steps before the first version.")] = 120,
    seed: Annotated[int, typer.Option(help="Of problems and initial weights.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which the run gives up.")] = 3600.0,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """GRPO on a string task, with rollouts on replicas that are updated while they generate."""
    from examples.grpo.run import run

    try:
        wish = Settings(
            mode=mode.value, staleness=staleness, engine=engine.value, replicas=replicas, trainer_ranks=trainer_ranks, steps=steps,
            groups=groups, group_size=group_size, updates=updates, rate=rate, warm_up=warm_up, seed=seed, timeout=timeout,
        )  # fmt: skip
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(run(wish, json))


if __name__ == "__main__":
    typer.run(main)
