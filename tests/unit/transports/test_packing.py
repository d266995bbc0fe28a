"""Holds the settings of packed broadcasts to their bounds, and buckets to holding every byte once, in order, aligned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weightsync.errors import ConfigurationError
from weightsync.transports.collective import Collective
from weightsync.transports.packed_broadcast import Buckets
from weightsync.transports.packing import LEAST_BUFFER, MOST_BUFFER, BufferSettings

GIB = 1 << 30


@pytest.mark.parametrize(
    "settings",
    [
        {"buffer_bytes": 0},
        {"buffer_bytes": -1},
        {"buffer_bytes": "64MiB"},
        {"buffer_bytes": True},
        {"buffer_bytes": MOST_BUFFER + 1},
        {"buffer_bytes": LEAST_BUFFER - 1},
        {"buffer_memory_ratio": 0},
        {"buffer_memory_ratio": -0.1},
        {"buffer_memory_ratio": "0.1"},
        {"buffer_memory_ratio": 0.51},
        {"buffer_memory_ratio": float("nan")},
        {"num_buffers": 0},
        {"num_buffers": -2},
        {"num_buffers": "2"},
        {"num_buffers": 17},
        {"buffer_bytes": GIB, "buffer_memory_ratio": 0.1},
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        BufferSettings(**settings)
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        Collective(**settings)


@pytest.mark.parametrize("seconds", [-1, "2", float("inf"), True])
def test_a_gathering_is_bounded(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="gather_seconds"):
        Collective(gather_seconds=seconds)


def test_a_ratio_is_of_the_free_memory_for_all_buffers_together() -> None:
    assert BufferSettings().bytes_each(64 * GIB, 5) == 5
    assert BufferSettings(buffer_bytes=GIB + 1).bytes_each(64 * GIB, 5) == GIB
    assert BufferSettings(buffer_memory_ratio=0.125, num_buffers=4).bytes_each(64 * GIB, 5) == 2 * GIB
    assert BufferSettings(buffer_memory_ratio=0.01).bytes_each(1 << 20, 5) == LEAST_BUFFER
    assert BufferSettings(buffer_memory_ratio=0.5).bytes_each(1 << 40, 5) == MOST_BUFFER


@pytest.mark.parametrize("seed", range(20))
def test_buckets_hold_every_byte_once_in_order_and_aligned(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.choice([0, 1, 511, 512, 513, 4000, 70_000], random.integers(0, 60)).tolist()
    room = int(random.integers(1, 40)) * 512 + int(random.integers(0, 512))
    found = Buckets.of(sizes, room)
    position = [0] * len(sizes)
    assert len(found.edges) == len(found.sizes) + 1
    assert found.edges[0] == 0
    assert found.edges[-1] == len(found.piece)
    for bucket in range(len(found.sizes)):
        rows = range(int(found.edges[bucket]), int(found.edges[bucket + 1]))
        end = 0
        for row in rows:
            piece = int(found.piece[row])
            assert all(position[before] == sizes[before] for before in range(piece))
            assert (found.first[row], found.offset[row]) == (position[piece], -(-end // 512) * 512)
            position[piece] += int(found.nbytes[row])
            end = int(found.offset[row] + found.nbytes[row])
        assert 0 < end == found.sizes[bucket] <= room
    assert position == sizes


def test_impossible_buckets_are_refused() -> None:
    for sizes, room in (([1], 511), ([-1], 1024)):
        with pytest.raises(ConfigurationError):
            Buckets.of(sizes, room)
