"""Holds packed broadcasts over NCCL to moving every byte of every version, and to their deadline: two processes, two GPUs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(150),
]

PROGRAM = Path(__file__).with_name("packed_broadcast_rank.py")


def _play(how: str) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), str(port), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        second = ranks[1].communicate(timeout=120)[0]
        first = ranks[0].communicate(timeout=60)[0]
    finally:
        for process in ranks:
            process.kill()
            process.wait(10)
    return [json.loads(text.splitlines()[-1]) for text in (first, second)]


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
