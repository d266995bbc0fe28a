"""Experts in other slots than the loader puts them in: shards over this rank's slots, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from weightsync.errors import LayoutError
from weightsync.model import Manifest, TensorSpec
from weightsync.tracing.slots import at_slots
from weightsync.tracing.tracer import Traced, trace_loader

EXPERTS, ROWS, COLUMNS = 4, 3, 5
EACH = Manifest([*(TensorSpec(f"{expert}.{part}", (ROWS, COLUMNS), "float32") for expert in range(EXPERTS) for part in ("a", "b")),
                 TensorSpec("norm", (COLUMNS,), "float32")])  # fmt: skip
FUSED = Manifest([TensorSpec("ab", (EXPERTS, COLUMNS, 2 * ROWS), "float32"), TensorSpec("norm", (COLUMNS,), "float32")])
Items = Iterable[tuple[str, torch.Tensor]]


def each(parameters: dict[str, torch.Tensor]) -> Callable[[Items], None]:
    """A loader of single experts, into two halves of each slot."""

    def load(tensors: Items) -> None:
        for name, tensor in tensors:
            if name == "norm":
                parameters["norm"].copy_(tensor)
            else:
                expert, part = name.split(".")
                parameters["w"][int(expert)].narrow(0, ROWS * (part == "b"), ROWS).copy_(tensor)

    return load


def fused(parameters: dict[str, torch.Tensor]) -> Callable[[Items], None]:
    """A loader of all experts at once, transposed."""

    def load(tensors: Items) -> None:
        for name, tensor in tensors:
            parameters["norm" if name == "norm" else "w"].copy_(tensor if name == "norm" else tensor.transpose(1, 2))

    return load


def trace(loader: Callable[[dict[str, torch.Tensor]], Callable[[Items], None]], manifest: Manifest) -> Traced:
    every = {"w": torch.empty(EXPERTS, 2 * ROWS, COLUMNS, device="meta"), "norm": torch.empty(COLUMNS, device="meta")}
    return trace_loader(loader(every), every, manifest)


@pytest.mark.parametrize(("loader", "manifest"), [(each, EACH), (fused, FUSED)])
@pytest.mark.parametrize("slots", [(0, 1, 2, 3), (2, 0), (3, 3, 1), (1, 2, 0, 3, 1, 1)])
def test_every_slot_gets_its_expert(
    loader: Callable[[dict[str, torch.Tensor]], Callable[[Items], None]], manifest: Manifest, slots: tuple[int, ...]
) -> None:
    traced = at_slots(trace(loader, manifest), {"w": slots})
    checkpoint = {spec.name: torch.randn(spec.shape) for spec in manifest}
    whole = {"w": torch.zeros(EXPERTS, 2 * ROWS, COLUMNS), "norm": torch.zeros(COLUMNS)}
    loader(whole)(checkpoint.items())
    mine = {"w": torch.zeros(len(slots), 2 * ROWS, COLUMNS), "norm": torch.zeros(COLUMNS)}
    shards = traced.shards(mine)
    for shard in shards:
        shard.tensor.copy_(checkpoint[shard.name][shard.box.slices])
    assert torch.equal(mine["w"], whole["w"][list(slots)])
    assert torch.equal(mine["norm"], whole["norm"])
    assert sum(shard.tensor.numel() for shard in shards) == mine["w"].numel() + COLUMNS, "each place once"


def test_what_is_on_the_border_of_slots_and_an_unknown_parameter_are_refused() -> None:
    parameters = {"w": torch.empty(2, 5, device="meta")}

    def load(tensors: Items) -> None:
        for _, tensor in tensors:
            parameters["w"].view(-1)[3:7].copy_(tensor)

    traced = trace_loader(load, parameters, Manifest([TensorSpec("across", (4,), "float32")]))
    with pytest.raises(LayoutError, match="border of two slots of w"):
        at_slots(traced, {"w": (1, 0)})
    with pytest.raises(LayoutError, match="parameter other"):
        at_slots(traced, {"other": (0,)})
