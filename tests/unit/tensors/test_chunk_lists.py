"""Parts of DTensors that say themselves where they lie, by torch's checkpoint protocol."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from weightsync.errors import LayoutError
from weightsync.tensors.shards import shards_of


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((1,), (2, 3)), ((6,), (6,)), ((3, 0), (2, 3)), ((1, 0), (1, 3))],
    ids=["ranks differ", "flat", "beyond the shape", "other size"],
)
def test_a_chunk_that_is_no_box_of_its_tensor_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1))
        chunk = SimpleNamespace(offsets=offsets, sizes=sizes)
        local: Any = tensor._local_tensor
        local.__create_chunk_list__ = lambda: [chunk]
        with pytest.raises(LayoutError):
            shards_of({"a": tensor})
    finally:
        dist.destroy_process_group()
