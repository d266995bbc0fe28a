"""Lists that a GPU makes are those that a CPU makes, also since versions that are older than the last one."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where kernels are imported

from weightsync.deadline import Deadline
from weightsync.model import Manifest, TensorSpec
from weightsync.publishing.listed_changes import DeviceLists, HostLists, ListedChanges
from weightsync.tensors.changes import Step
from weightsync.tensors.cuda.changes import ChangeFinder, DeviceStep
from weightsync.tensors.memory_layout import packed_layout
from weightsync.tensors.shards import shard

MANIFEST = Manifest([TensorSpec("line", (50,), "float32"), TensorSpec("table", (100, 300), "bfloat16")])
SHARDS = [
    shard("line", torch.zeros(50), (50,), (0,)),
    shard("table", torch.zeros(100, 300, dtype=torch.bfloat16), (100, 300), (0, 0)),
]
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def test_a_version_that_changes_too_much_or_fails_ends_what_is_remembered() -> None:
    layout = packed_layout(MANIFEST, SHARDS)
    lists, never = HostLists(MANIFEST, layout, 4000), np.zeros(1, np.int8)
    region = np.zeros(lists.end, np.uint8)
    seen = []
    for number, changed in enumerate((0, 40, 40, 30_000, 40, 40), 1):
        region[:changed] ^= 1
        lists.update(region, never)
        lists.placed(1, number)
        seen.append([base for _, base in lists.history])
    assert seen == [[], [1], [1, 2], [], [4], [4, 5]]


@pytest.mark.timeout(400)  # the interpreter is slow
@pytest.mark.parametrize("lacking", ["step", "unite"])
def test_where_the_device_has_no_memory_only_the_last_changes_are_listed(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(ChangeFinder, lacking, fail)
    layout = packed_layout(MANIFEST, SHARDS)
    lists = DeviceLists(MANIFEST, layout, True, 0, layout.regions[0], DEVICE)
    lists.use(torch.zeros(lists.end, dtype=torch.uint8, device=DEVICE))
    before, now = (torch.zeros(layout.regions[0], dtype=torch.uint8, device=DEVICE) for _ in range(2))
    lists.wanted = (1, 2)
    for number in range(1, 4):
        now[:20] += 1
        lists.start(lists.sections.offset + before.data_ptr(), lists.sections.offset + now.data_ptr())
        lists.launch(0, len(lists.sections))
        lists.finish(Deadline(300.0))
        lists.placed(1, number)
        assert [each.number for each in lists.changed] == ([number - 1] if number > 1 else [])
    assert lists.history == ((1, 1), (1, 2)) if lacking == "unite" else lists.history == ()


@pytest.mark.timeout(400)  # the interpreter is slow
@pytest.mark.parametrize("on_host", [False, True])
def test_lists_on_a_gpu_are_those_on_a_cpu(on_host: bool) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    layout = packed_layout(MANIFEST, SHARDS)
    size, never, draw = layout.regions[0], np.zeros(1, np.int8), np.random.default_rng(0)
    ours, theirs = HostLists(MANIFEST, layout, True), DeviceLists(MANIFEST, layout, True, 0, size, DEVICE)
    region, memory = np.zeros(ours.end, np.uint8), torch.zeros(theirs.end, dtype=torch.uint8, device=DEVICE)
    theirs.use(memory, on_host=on_host)
    before, now = (torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))

    def lists_of(lists: ListedChanges[Step] | ListedChanges[DeviceStep], content: bytes) -> list[tuple[int, bytes, bytes]]:
        return [
            (each.number, content[each.counts :][: 2 * lists.sections.blocks], content[each.payload :][: 4 * each.units])
            for each in lists.changed
        ]

    for number in range(1, 6):
        region[:size][draw.random(size) < 0.003] ^= 0x11
        now.copy_(torch.from_numpy(region[:size]))
        ours.wanted = theirs.wanted = (1, 2)
        ours.update(region, never)
        theirs.start(theirs.sections.offset + before.data_ptr(), theirs.sections.offset + now.data_ptr())
        theirs.launch(0, len(theirs.sections))
        theirs.finish(Deadline(300.0))
        ours.placed(1, number)
        theirs.placed(1, number)
        assert theirs.history == ours.history
        assert theirs.shares == ours.shares
        assert torch.equal(before, now)
        assert lists_of(theirs, memory.cpu().numpy().tobytes()) == lists_of(ours, region.tobytes())
    assert [each.number for each in theirs.changed] == [4, 1, 2]
