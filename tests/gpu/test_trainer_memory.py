"""The GPU memory of a trainer that was killed: engines have mapped it, so it is in use until they let go of it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.processes import ChildProcess
from torch import nn

from weightsync.config import ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.server.server import BackgroundServer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150), pytest.mark.filterwarnings("default::DeprecationWarning")]
pytest.importorskip("triton", reason="needs Triton")

WIDTH = 16384
NBYTES = 2 * WIDTH**2
TRAINER = """
import sys, torch, weightsync
width, url, token, number = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
module = torch.nn.Linear(width, width, bias=False, device="cuda:0", dtype=torch.bfloat16)
torch.nn.init.constant_(module.weight, float(number))
trainer = weightsync.Trainer(module, url, token=token)
print(trainer.publish(number, timeout=60).replicas[0].transports, flush=True)
sys.stdin.read()
"""


def free() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


def test_the_memory_of_a_trainer_that_was_killed_is_free_and_the_next_one_publishes() -> None:
    served = nn.Linear(WIDTH, WIDTH, bias=False, device=f"cuda:{torch.cuda.device_count() - 1}", dtype=torch.bfloat16)
    adapter = ModuleAdapter(served)
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Engine(adapter, "e0", server.url, token=server.token),
    ):
        before = free()
        for number in (1, 2):
            with ChildProcess("-W", "ignore", "-c", TRAINER, WIDTH, server.url, server.token, number) as trainer:
                assert "cuda_ipc" in trainer.line()
            assert before - free() > NBYTES // 2, "mapped: else this tests nothing"
            deadline = time.monotonic() + 30
            while before - free() > NBYTES // 2 and time.monotonic() < deadline:
                threading.Event().wait(0.1)
            assert before - free() < NBYTES // 2
            with adapter.in_use(10.0) as version:
                assert version is not None
                assert bool((served.weight == number).all())
