"""Holds process groups outside the default world to their contract over NCCL: two processes, two GPUs."""

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
    with ranks(2, "tests.gpu.nccl_group_rank", port, how) as (first, second):
        second.end(120)
        first.end(60)
    return [json.loads(process.printed.splitlines()[-1]) for process in (first, second)]


@pytest.mark.parametrize("how", ["ours", "recipe"])
def test_bytes_cross_between_our_ranks_and_to_the_engines_recipe(how: str) -> None:
    assert [found["equal"] for found in _play(how)] == [True, True]


def test_broadcast_that_nobody_sends_ends_at_its_deadline() -> None:
    _, waiting = _play("late")
    assert waiting["equal"]
    assert (waiting["error"], waiting["closed"]) == ("DeadlineExceeded", True)
    assert 2 < waiting["seconds"] < 20
