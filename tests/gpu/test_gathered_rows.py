"""Shards on a GPU cross to host memory in groups: every bit arrives, converted as on a CPU, again and again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightsync.publishing.copied_shards import HostPublisher
from weightsync.tensors.memory_layout import packed_layout
from weightsync.tensors.shards import shards_of

pytestmark = [pytest.mark.gpu]


@pytest.mark.parametrize("wanted", [None, torch.bfloat16], ids=str)
def test_many_shards_of_a_gpu_arrive_as_those_of_a_cpu(wanted: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = [(97, 33)] * 400 + [(), (1,), (0, 3), (5000, 4100), (31, 7, 9)]
    state = {f"t{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}
    state["turned"] = state["t1"].t()
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    there = {name: tensor.to(device) for name, tensor in state.items()}
    regions, digests = [], []
    for _ in range(3):
        for held in (state, there):
            manifest, shards = shards_of(held, dtype=wanted)
            layout = packed_layout(manifest, shards)
            regions.append(np.zeros(layout.regions[0], np.uint8))
            digests.append(HostPublisher(manifest, shards, layout, regions[-1].ctypes.data).place())
        assert np.array_equal(regions[-1], regions[-2]) and np.array_equal(digests[-1], digests[-2])
        for name, tensor in state.items():  # the next version
            if name != "turned":
                tensor.add_(1.0)
                there[name].add_(1.0)
        there["turned"] = there["t1"].t()


def test_a_publisher_follows_what_its_gpu_holds() -> None:
    tensor = torch.zeros(300, 300, device="cuda")
    manifest, shards = shards_of({f"t{index}": tensor[index] for index in range(300)})
    layout = packed_layout(manifest, shards)
    region = np.zeros(layout.regions[0], np.uint8)
    placer = HostPublisher(manifest, shards, layout, region.ctypes.data)
    for number in range(1, 4):
        tensor.fill_(number)
        placer.place()
        rows = [region[int(first) :][:1200].view(np.float32) for first in layout.offset]
        assert all((row == number).all() for row in rows)
