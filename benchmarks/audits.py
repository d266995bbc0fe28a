"""What it costs an engine that generates to have its weights read again: ``python -m benchmarks.audits``.

An engine multiplies by its matrices as fast as it can, on all cores, in turns with and without audits. Beside the difference stand
the time of one look and, as its floor, of reading the same memory once. On a GPU: ``--device cuda``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import httpx
import torch

from benchmarks.deltas import model
from weightsync.config import ServerSettings
from weightsync.coordinator.audits import Audits
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.protocol.tokens import bearer
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer


def steps_per_second(module: torch.nn.Sequential, seconds: float) -> float:
    """How often ``module`` is applied to a batch of eight, in bfloat16, of which each layer gets the same input."""
    inputs = torch.ones(8, 1024, dtype=torch.bfloat16, device=next(module.parameters()).device)
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for layer in module:
            answer = layer(inputs)
        answer.sum().item()  # waits for a GPU
        steps += 1
    return steps / (time.perf_counter() - began)


def reading_seconds(module: torch.nn.Module) -> float:
    """The median time of reading all parameters once."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        sum(parameter.view(torch.int32).amax() for parameter in module.parameters()).item()  # type: ignore[union-attr]
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def measured(source: torch.nn.Module, target: torch.nn.Sequential, share: float, seconds: float) -> tuple[float, float, float]:
    """Steps a second while the engine serves, how often it was read again, and the seconds that this took, all together."""
    with (
        BackgroundServer(ServerSettings.load({}, port=0, audit_share=share)) as server,
        Trainer(source, server.url, token=server.token) as trainer,
        Engine(ModuleAdapter(target), "replica-0", server.url, token=server.token),
    ):
        trainer.wait_for_replicas(timeout=300.0)
        trainer.publish(timeout=600.0)
        steps = steps_per_second(target, seconds)
        answer = httpx.get(f"{server.url}/metrics", headers=bearer(server.secrets.token), trust_env=False, timeout=60.0)
        lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line.startswith("weightsync_audit"))
        if float(lines["weightsync_audit_failures_total"]):
            raise RuntimeError("weights that nobody changed were found to be others")
        return steps, float(lines["weightsync_audit_seconds_count"]), float(lines["weightsync_audit_seconds_sum"])


def rows(mebibytes: int, share: float, seconds: float, turns: int, device: str = "cpu") -> dict[str, float]:
    """Medians of all turns, of which half are without audits, and the lowest and the highest of the ratios of neighbours."""
    with torch.device(device):  # 30 GB of random numbers take minutes on a CPU
        source, target = model(mebibytes), model(mebibytes)
    assert isinstance(source, torch.nn.Sequential)
    assert isinstance(target, torch.nn.Sequential)
    found: dict[bool, list[float]] = {False: [], True: []}
    looks = spent = 0.0
    steps_per_second(target, min(seconds, 5.0))
    for turn in range(2 * turns):
        audited = bool((turn + turn // 2) % 2)  # without, with, with, without, ...
        steps, *looked = measured(source, target, share if audited else 0.0, seconds)
        found[audited].append(steps)
        looks, spent = looks + looked[0], spent + looked[1]
    ratios: Sequence[float] = [one / other for one, other in zip(found[True], found[False], strict=True)]
    return {
        "steps_per_second_without": statistics.median(found[False]),
        "steps_per_second_with": statistics.median(found[True]),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "looks": looks,
        "look_ms": 1e3 * spent / max(looks, 1.0),
        "reading_ms": 1e3 * reading_seconds(target),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=4, help="with audits, and as many without")
    parser.add_argument("--least", type=float, default=Audits.least_seconds, help="seconds between two looks, at least")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    Audits.least_seconds = options.least
    row = rows(options.mebibytes, options.share, options.seconds, options.turns, options.device)
    print(json.dumps({"mebibytes": options.mebibytes, "share": options.share, "device": options.device} | row))


if __name__ == "__main__":
    main()
