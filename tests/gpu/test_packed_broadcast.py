"""Holds packed broadcasts over NCCL to moving every byte of every version, and to their deadline: two processes, two GPUs."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import torch
from tests.processes import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(150),
]


def _play(how: str) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ranks(2, "tests.gpu.packed_broadcast_rank", port, how) as (first, second):
        second.end(120)
        first.end(60)
    return [json.loads(process.printed.splitlines()[-1]) for process in (first, second)]


@pytest.mark.parametrize("how", ["whole", "few"])
def test_three_versions_of_odd_tensors_arrive_through_three_small_buffers(how: str) -> None:
    for found in _play(how):
        assert found["equal"] == [True, True, True]
        assert 0 < found["buffer_bytes"] <= 3 * (2 << 20)
        assert found["nbytes"] > 20 << 20


def test_broadcast_that_nobody_sends_ends_at_its_deadline() -> None:
    _, waiting = _play("late")
    assert waiting["equal"] == [True, True, True]
    assert (waiting["error"], waiting["closed"]) == ("DeadlineExceeded", True)
    assert 2 < waiting["seconds"] < 20
