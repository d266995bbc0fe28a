"""The demo's training goes on from a checkpoint as if it had never ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from examples.demo.models import build_model
from examples.demo.training import Training, batches


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
def test_it_resumes_exactly_with_the_optimizers_state(tmp_path: Path, tied: bool) -> None:
    torch.set_num_threads(1)
    training = Training(build_model("llama", tied=tied, seed=0), 0)
    training.step()
    training.save(tmp_path, (1, 2))
    training.save_optimizer(tmp_path, (1, 2))
    resumed = Training(build_model("llama", tied=tied, seed=1), 0)
    resumed.resume(tmp_path, (1, 2))
    drawn = [next(training.batches) for _ in range(2)]
    training.batches, resumed.batches = iter(drawn), iter(drawn)
    assert [training.step(), training.step()] == [resumed.step(), resumed.step()]


def test_another_epoch_draws_other_batches() -> None:
    first, second = batches(0, 0), batches(0, 0, epoch=2)
    assert not torch.equal(next(first), next(second))
    assert torch.equal(next(batches(0, 0, epoch=2)), next(batches(0, 0, epoch=2)))
