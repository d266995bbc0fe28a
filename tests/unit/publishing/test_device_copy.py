"""A copy in GPU memory that lists changes: the memory in which it converts. What it computes is tested on GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.publishing import copied_shards
from weightsync.publishing.copied_shards import DeviceCopy
from weightsync.publishing.listed_changes import DeviceLists
from weightsync.tensors.memory_layout import packed_layout
from weightsync.tensors.shards import shards_of


def test_a_copy_of_moved_shards_converts_in_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized weights take as much as the copy itself, and a trainer whose parameters move made it anew beside the old one."""
    monkeypatch.setattr(copied_shards, "DeviceDigest", lambda *_: SimpleNamespace(build=lambda addresses: None))
    manifest, shards = shards_of({"a": torch.randn(40, 8), "b": torch.randn(3)}, dtype=torch.bfloat16)
    layout = packed_layout(manifest, shards)
    changes = DeviceLists(manifest, layout, True, 0, sum(layout.regions), torch.device("cpu"))
    region: Any = SimpleNamespace(memory=torch.zeros(changes.end, dtype=torch.uint8))
    before, now = (DeviceCopy(manifest, shards, layout, region, changes=changes) for _ in range(2))
    assert before._scratch.data_ptr() == now._scratch.data_ptr() and len(now._scratch) >= sum(layout.regions) - 64
    assert [target.data_ptr() for target in now._targets] == [target.data_ptr() for target in before._targets]
