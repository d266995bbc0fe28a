"""Holds the broadcast cases to what they say they measure; no GPU."""

from __future__ import annotations

import pytest
from benchmarks.gpu_broadcast import main, variants_of

from weightsync.errors import ConfigurationError


def test_the_floor_is_first_and_sizes_are_those_asked_for() -> None:
    found = variants_of(64 << 20, 1)
    assert [one.kind for one in found] == ["flat", "by_tensor", "concatenated", "packed"]
    assert (found[-1].buffer_bytes, found[-1].num_buffers, found[-1].priority) == (64 << 20, 1, True)
    sweep = variants_of(sweep=True)
    assert len(sweep) > 8
    assert {one.kind for one in sweep[4:]} == {"packed"}


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs 101 GPUs"):
        main(["--readers", "100"])
