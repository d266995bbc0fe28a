"""Plans of streams: kept from one publication to the next, and equal to one made anew whatever changed in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, ManifestMismatch
from weightsync.trainer.stream import Stream
from weightsync.trainer.stream_plan import PlannedPart, StreamPlan, WindowRing

Tensors = list[tuple[str, torch.Tensor]]

CAPACITY = 1024
WINDOWS = 3


def new_plan(memory: torch.Tensor, rank: int = 0, world_size: int = 1) -> StreamPlan:
    return StreamPlan(WindowRing(memory, CAPACITY, rank, world_size, {"half": torch.float16}), CAPACITY)


def planned(plan: StreamPlan, tensors: Tensors) -> list[PlannedPart]:
    parts = [part for index, (name, tensor) in enumerate(tensors) for part in plan.parts(index, name, tensor)]
    plan.cut(len(tensors))
    return parts


def drawn(draw: random.Random) -> Tensors:
    """Tensors of which some are larger than a window, and some are empty."""
    count = draw.randrange(1, 20)
    names = [*(f"layers.{number}.w" for number in range(count)), "half"]
    return [
        (name, torch.zeros(draw.choice((0, 1, 3, 40)), draw.choice((1, 30)), dtype=draw.choice((torch.float32, torch.bfloat16))))
        for name in names
    ]


def changed(draw: random.Random, tensors: Tensors) -> Tensors:
    at, other = draw.randrange(len(tensors)), torch.zeros(draw.choice((1, 90)), 5)
    match draw.randrange(6):
        case 0:
            return tensors[:at] or tensors
        case 1:
            return [*tensors, (f"more {draw.random()}", other)]
        case 2:
            return [*tensors[:at], (tensors[at][0], other), *tensors[at + 1 :]]
        case 3:
            return [*tensors[:at], (f"between {draw.random()}", other), *tensors[at:]]
        case 4:
            return tensors[::-1]
        case _:
            return [(name, tensor.double()) for name, tensor in tensors]


def described(part: PlannedPart) -> tuple[object, ...]:
    target = part.target
    return *part[:3], None if target is None else (target.data_ptr(), target.shape, target.dtype)


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_that_is_kept_is_the_one_that_would_be_made_anew(seed: int) -> None:
    draw, memory = random.Random(seed), torch.zeros(WINDOWS * CAPACITY, dtype=torch.uint8)
    world_size = draw.randrange(1, 4)
    rank = draw.randrange(world_size)
    kept, tensors = new_plan(memory, rank, world_size), drawn(draw)
    for _ in range(4):
        fresh = new_plan(memory, rank, world_size)
        parts, wanted = planned(kept, tensors), planned(fresh, tensors)
        assert [described(part) for part in parts] == [described(part) for part in wanted]
        for window in range(rank, parts[-1].window + 1, world_size):
            one, other = kept.contents(window), fresh.contents(window)
            assert (one.parts, one.nbytes, one.offset) == (other.parts, other.nbytes, other.offset)
            assert np.array_equal(one.digests(Deadline(10)), other.digests(Deadline(10)))
        assert kept.end().tensors == fresh.end().tensors
        tensors = draw.choice((tensors, changed(draw, tensors)))


def test_a_stream_that_comes_again_is_planned_once() -> None:
    memory = torch.zeros(WINDOWS * CAPACITY, dtype=torch.uint8)
    tensors = [(f"{number}", torch.zeros(number, 100)) for number in range(5)]
    plan = new_plan(memory)
    first = planned(plan, tensors)
    manifest, contents = plan.end(), [plan.contents(part.window) for part in first]
    again = planned(plan, [(name, tensor.clone()) for name, tensor in tensors])
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert plan.end() is manifest
    assert all(plan.contents(part.window) is one for part, one in zip(first, contents, strict=True))


def test_what_came_already_is_noticed_after_tensors_that_are_as_before() -> None:
    plan = new_plan(torch.zeros(WINDOWS * CAPACITY, dtype=torch.uint8))
    tensors = [("a", torch.zeros(3)), ("b", torch.zeros(3))]
    planned(plan, tensors)
    plan.end()
    with pytest.raises(ManifestMismatch, match="a twice"):
        planned(plan, [*tensors, ("a", torch.zeros(3))])


def test_what_cannot_be_published_is_refused() -> None:
    plan = StreamPlan(WindowRing(torch.zeros(8, dtype=torch.uint8), 4, 0, 1, None), 4)
    with pytest.raises(ConfigurationError, match="no element"):
        plan.parts(0, "w", torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ConfigurationError, match="cannot be published"):
        plan.parts(0, "w", torch.zeros(1, dtype=torch.complex64))


@pytest.mark.parametrize(("free", "nbytes"), [(100 << 30, 1 << 30), (6 << 30, 512 << 20), (1 << 20, 1 << 20)])
def test_windows_on_a_gpu_leave_most_of_its_free_memory(free: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 140 << 30))
    assert Stream(device="cuda:0").capacity == nbytes
    assert Stream(device="cuda:0", window_bytes=3 << 30).capacity == 3 << 30
