"""A tiny run of the benchmark of deltas."""

from __future__ import annotations

import pytest
from benchmarks.deltas import measured

from weightsync.transports.tcp.transport import Tcp


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", Tcp(encrypt=True)])
def test_a_tiny_run_alternates_between_all_bytes_and_what_changed(transport: str | Tcp) -> None:
    row = measured(8, 0.01, transport, 1)
    assert row["dense_bytes"] == 8 << 20
    assert 0.019 < row["bytes_ratio"] < 0.022
    assert row["paused_ms_ratio"] > 0 and row["round_ms_ratio"] > 0


def test_a_tiny_run_streams_the_matrices_that_changed() -> None:
    assert measured(16, 0.25, "shared_memory", 1, "streamed")["bytes_ratio"] == 0.25
