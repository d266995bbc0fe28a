"""Holds tracing to real execution: random programs of views, copies, buffers and arithmetic, run on unique numbers and traced."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch

from weightsync.model import Manifest, TensorSpec
from weightsync.tracing.tracer import Traced, trace_loader

ROUNDS, PROGRAMS = 10, 10
MANY = 1_000_000
SIZE = 300
NOTHING = -1

Item = tuple[str, torch.Tensor]


class Program:
    """A loader that does the same to any tensors of the same shapes: what it draws depends on shapes alone."""

    def __init__(self, seed: int, parameters: dict[str, torch.Tensor], spiteful: bool) -> None:
        self.seed, self.parameters, self.spiteful = seed, parameters, spiteful

    def __call__(self, tensors: Iterable[Item]) -> None:
        self.draw = random.Random(self.seed)
        self.free = {name: 0 for name in self.parameters}
        self.scratch = torch.full((SIZE,), NOTHING)
        held: list[torch.Tensor] = []
        for _, tensor in tensors:
            held.append(tensor)
            if self.draw.random() < 0.6:
                self.store(self.chain(held))
        for _ in range(self.draw.randint(1, 4)):
            self.store(self.chain(held))

    def chain(self, held: list[torch.Tensor]) -> torch.Tensor:
        tensor = self.draw.choice(held)
        for _ in range(self.draw.randint(0, 6)):
            new = self.step(tensor)
            if 0 < new.numel() <= SIZE:
                tensor = new
        if self.draw.random() < 0.3:
            held.append(tensor)
        return tensor

    def step(self, x: torch.Tensor) -> torch.Tensor:
        draw = self.draw
        dim = draw.randrange(x.dim()) if x.dim() else 0
        kinds = ["clone", "stack", "unsqueeze", "repeat", "buffer", "scratch"]
        if x.dim():
            kinds += [
                "narrow",
                "transpose",
                "flat",
                "reshape",
                "slice",
                "select",
                "contiguous",
                "cat",
                "pad",
                "rows",
                "expand",
                "split",
            ]
        if self.spiteful:
            kinds += ["add", "scatter", "reused"]
        match draw.choice(kinds):
            case "clone":
                return x.clone()
            case "contiguous":
                return x.transpose(0, dim).contiguous()
            case "narrow":
                first = draw.randrange(x.shape[dim])
                return x.narrow(dim, first, draw.randint(1, x.shape[dim] - first))
            case "transpose":
                return x.transpose(0, dim)
            case "flat":
                return x.reshape(-1)
            case "reshape":
                divisors = [k for k in range(1, x.numel() + 1) if x.numel() % k == 0]
                return x.reshape(draw.choice(divisors), -1)
            case "slice":
                return x[(slice(None),) * dim + (slice(draw.randrange(min(2, x.shape[dim])), None, draw.randint(1, 3)),)]
            case "select":
                return x.select(dim, draw.randrange(x.shape[dim]))
            case "split":
                return draw.choice(x.chunk(2, dim))
            case "unsqueeze":
                return x.unsqueeze(draw.randint(0, x.dim()))
            case "expand":
                return x.unsqueeze(0).expand(2, *x.shape)
            case "stack":
                return torch.stack([x, x], draw.randint(0, x.dim()))
            case "cat":
                half = x.narrow(dim, 0, max(x.shape[dim] // 2, 1))
                return torch.cat([half, x], dim) if draw.random() < 0.5 else torch.cat([x, half], dim)
            case "pad":
                return torch.nn.functional.pad(x, (draw.randint(0, 2), draw.randint(0, 2)), value=NOTHING)
            case "repeat":
                return x.repeat(2, *([1] * x.dim()))
            case "rows":
                rows = torch.tensor([draw.randrange(x.shape[dim]) for _ in range(draw.randint(1, 4))])
                return x.index_select(dim, rows) if draw.random() < 0.5 else x[(slice(None),) * dim + (rows,)]
            case "buffer":
                wide = torch.full((2 * x.numel() + 3,), NOTHING)
                wide[3 : 3 + x.numel()].view(x.shape).copy_(x)
                return wide
            case "scratch":  # as loaders stage: one buffer for all, of which the front is used
                staged = self.scratch[: x.numel()].view(x.shape)
                staged.copy_(x)
                return staged.clone()
            case "reused":
                wide = x.reshape(-1).clone()
                wide[: x.numel() // 2].copy_(x.reshape(-1)[x.numel() - x.numel() // 2 :])
                return wide
            case "scatter":
                out = x.reshape(-1).clone()
                out[torch.tensor([0])] = out[-1:].clone()
                return out
            case _:
                return x * 1

    def store(self, x: torch.Tensor) -> None:
        draw = self.draw
        name = draw.choice(list(self.parameters))
        first = self.free[name] + draw.randint(0, 3)
        if first + x.numel() > SIZE:
            return
        overlap = draw.randint(0, 2) if self.spiteful and draw.random() < 0.2 else 0
        self.free[name] = max(first + x.numel() - overlap, 0)
        order = list(range(x.dim()))
        draw.shuffle(order)
        flat = self.parameters[name].view(-1)[first : first + x.numel()]
        target = flat.view([x.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(x.dim())])
        target.copy_(x)
        if self.spiteful and draw.random() < 0.1:
            flat[: draw.randint(1, flat.numel())].fill_(NOTHING)


def numbered(manifest: Manifest) -> list[Item]:
    """Every element is a number of its own."""
    return [(spec.name, (i * MANY + torch.arange(spec.size)).view(spec.shape)) for i, spec in enumerate(manifest)]


def fresh() -> dict[str, torch.Tensor]:
    return {name: torch.full((SIZE // 10, 10), NOTHING) for name in ("a", "b", "c")}


def replayed(traced: Traced, items: list[Item]) -> dict[str, torch.Tensor]:
    parameters = fresh()
    tensors = dict(items)
    for shard in traced.shards(parameters):
        region = tuple(slice(a, b) for a, b in zip(shard.box.starts, shard.box.stops, strict=True))
        assert bool((shard.tensor == NOTHING).all()), f"{shard.name} is delivered twice to one place"
        shard.tensor.copy_(tensors[shard.name][region])
    return parameters


def run(seed: int, spiteful: bool, on_meta: bool) -> Traced:
    draw = random.Random(seed)
    shapes = [tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 3))) for _ in range(draw.randint(1, 4))]
    manifest = Manifest(TensorSpec(f"t{i}", shape, "int64") for i, shape in enumerate(shapes))
    items = numbered(manifest)
    real = fresh()
    Program(seed, real, spiteful)(iter(items))
    twin = {name: one.to("meta") for name, one in fresh().items()} if on_meta else fresh()
    traced = trace_loader(Program(seed, twin, spiteful), twin, manifest)
    assert on_meta or all(bool((one == NOTHING).all()) for one in twin.values()), "tracing wrote to a parameter"
    again = replayed(traced, items)
    missing = {index for index, spec in enumerate(manifest) if spec.name in traced.fallback}
    assert not {copy.tensor for copy in traced.copies} & missing
    for name, wanted in real.items():
        delivered = again[name]
        left = torch.tensor([int(value) >= 0 and int(value) // MANY in missing for value in wanted.view(-1)]).view(wanted.shape)
        assert torch.equal(torch.where(left, NOTHING, wanted), delivered), (name, traced)
    for index, spec in enumerate(manifest):
        if index not in missing:
            held = {int(v) for one in real.values() for v in one.view(-1) if v >= 0 and int(v) // MANY == index}
            assert (len(held) == 0) == (spec.name in traced.unused)
            assert traced.partial.get(spec.name, spec.size) == (len(held) or spec.size)
    if not missing:
        left_over = {name: int((one == NOTHING).sum()) for name, one in real.items() if bool((one == NOTHING).any())}
        assert traced.unwritten == left_over
    return traced


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_plain_programs_are_followed_element_by_element(seed: int, round_: int) -> None:
    followed = delivered = 0
    for number in range(PROGRAMS):
        traced = run(seed + number, spiteful=False, on_meta=number % 2 == 0)
        followed += len(traced.copies)
        delivered += len({copy.tensor for copy in traced.copies})
        # Nothing but views and copies: only these two may keep a tensor from being delivered, the second where constants were
        # staged over what a buffer held before.
        twice = "parameters hold parts of it twice, in boxes that overlap but differ"
        for reason in traced.fallback.values():
            assert reason == twice or reason.startswith("it is partly overwritten in a buffer, then read from it")
    assert followed
    assert delivered


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_spiteful_programs_never_deliver_a_wrong_element(seed: int, round_: int) -> None:
    for number in range(PROGRAMS):
        run(seed + number, spiteful=True, on_meta=number % 2 == 0)


@pytest.mark.parametrize("number", [2966440817])
def test_programs_that_were_once_followed_wrongly(number: int) -> None:
    """A buffer overwritten in part, twice, was taken for wholly overwritten: mixed pieces on each other were counted one by one."""
    for on_meta in (False, True):
        run(number, spiteful=True, on_meta=on_meta)
