"""Holds the broadcast cases of the GPU suite to what they say they measure; no GPU."""

from __future__ import annotations

import pytest

from weightsync.bench.gpu_broadcast import run_broadcast_suite, variants_of
from weightsync.bench.options import BenchOptions
from weightsync.errors import ConfigurationError


def test_the_floor_is_first_and_sizes_are_those_asked_for() -> None:
    options = BenchOptions(suite="gpu", delivery="broadcast", bucket_bytes=64 << 20, buffers=1)
    found = variants_of(options)
    assert [one.kind for one in found] == ["flat", "by_tensor", "concatenated", "packed"]
    assert (found[-1].buffer_bytes, found[-1].num_buffers, found[-1].priority) == (64 << 20, 1, True)
    sweep = variants_of(BenchOptions(suite="gpu", delivery="broadcast", only=("sweep",)))
    assert len(sweep) > 8
    assert {one.kind for one in sweep[4:]} == {"packed"}


def test_too_few_gpus_and_other_deliveries_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs 101 GPUs"):
        run_broadcast_suite(BenchOptions(suite="gpu", delivery="broadcast"), 100, {})
    with pytest.raises(ConfigurationError, match="broadcast"):
        BenchOptions(delivery="everything")
