"""The share of bfloat16 words that an optimizer step changes, of the demo's model: ``python -m benchmarks.densities``.

Weights are float32 and published in bfloat16. The model is first trained at the demo's rate, so that its weights are no
longer random. Prints a row for each optimizer and learning rate: the medians of steps after the first few, in which
Adam's moments are not settled.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from examples.demo.models import build_model
from examples.demo.settings import RATE, OptimizerName
from examples.demo.training import batches, optimizers
from transformers import PreTrainedModel

_OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "muon")


def words(model: PreTrainedModel) -> torch.Tensor:
    """What is published of all parameters, as words."""
    return torch.cat([value.detach().bfloat16().view(torch.int16).flatten() for value in model.parameters()])


def train(model: PreTrainedModel, rate: float, name: OptimizerName, steps: int, seed: int) -> list[float]:
    """Train, and return the share of words that each step changed."""
    data, made, shares = batches(seed, 0), optimizers(model, rate, name), []
    before = words(model)
    for _ in range(steps):
        batch = next(data)
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        now = words(model)
        shares.append(float((now != before).float().mean()))
        before = now
    return shares


def main() -> None:
    """Print a table for the docs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=int, default=60, help="steps at the demo's rate")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 1e-4])
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build_model("llama", tied=True, seed=0).float().train()
    train(model, RATE, "adamw", options.before, 0)
    settled = options.steps // 4
    for name in _OPTIMIZERS:
        for rate in options.rates:
            shares = train(copy.deepcopy(model), rate, name, options.steps, 1)
            print(
                f"| {name} | {rate:g} | {100 * shares[0]:.2f} % | {100 * statistics.median(shares[settled:]):.2f} % |", flush=True
            )


if __name__ == "__main__":
    main()
