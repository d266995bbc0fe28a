"""What adapters of engines with a server of their own declare."""

from __future__ import annotations

import pytest

from weightsync.engines.sglang.joining import SglangAdapter
from weightsync.engines.staged_adapter import StagedAdapter
from weightsync.engines.vllm.adapter import VllmWorkerAdapter


@pytest.mark.parametrize("adapter", [SglangAdapter, VllmWorkerAdapter])
def test_an_engine_that_its_own_clients_can_resume_is_paused_again(adapter: type[StagedAdapter]) -> None:
    assert adapter.pauses_twice
    assert adapter.loads_late
