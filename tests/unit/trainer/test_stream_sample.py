"""Every tensor of a stream is compared between ranks in its turn, wherever it is and however it is published."""

from __future__ import annotations

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.model.window import is_sampled, sample_box
from weightsync.trainer.stream import StreamSample


def test_the_turn_of_every_tensor_comes() -> None:
    sampled = [{index for index in range(400) if is_sampled(index, number)} for number in range(5, 21)]
    assert set.union(*sampled) == set(range(400))
    assert set.intersection(*sampled) == set(range(16))
    assert max(map(len, sampled)) <= 16 + 400 // 16


@pytest.mark.parametrize("shape", [(), (0, 5), (1,), (37, 24), (50, 2048), (5, 300, 70), (70000,), (3, 40000, 3)])
def test_the_turn_of_every_element_comes(shape: tuple[int, ...]) -> None:
    seen = torch.zeros(shape, dtype=torch.bool)
    for turn in range(24):
        box = sample_box(shape, 4, 16 * turn)
        assert seen[box].numel() * 4 <= 64 << 10
        seen[box] = True
    assert seen.all()


def digests(number: int, *tensors: torch.Tensor, dtype: str = "bfloat16") -> bytes:
    sample = StreamSample(number)
    for index, tensor in enumerate(tensors):
        lent = tensor.clone()
        sample.take(index, lent, dtype)
        lent.fill_(0)  # its memory is used for the next one
    return sample.digests(Deadline(10))


def test_published_values_count() -> None:
    tensor = torch.randn(30, 40)
    published = tensor.bfloat16()
    assert digests(3, tensor) == digests(3, published) == digests(3, published.t().contiguous().t())
    other = published.clone()
    other[17, 5] += 1
    assert digests(3, published, published) != digests(3, published, other)
