"""Holds the settings of packed broadcasts to their bounds, and frames to holding every byte once, in order, aligned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weightsync.errors import ConfigurationError
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.broadcast.collective import Collective
from weightsync.transports.broadcast.nccl import ALIGNMENT, broadcast_frames, frames_of_groups
from weightsync.transports.broadcast.reader import LEAST_BUFFER, MOST_BUFFER
from weightsync.transports.broadcast.transport import BufferSettings
from weightsync.transports.net.frames import packed_copies

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
@pytest.mark.parametrize("sends", [True, False])
def test_frames_hold_every_byte_once_in_order_and_aligned(seed: int, sends: bool) -> None:
    """Each frame's copies, done one by one on bytes that say where they are from, against plain slices."""
    random = np.random.default_rng(seed)
    count = int(random.integers(0, 60))
    size, rows = random.choice([1, 511, 512, 513, 4000], count), random.integers(1, 5, count)
    stride = size + random.integers(0, 9, count)
    ends = np.cumsum(rows * stride)
    region = random.integers(0, 2, count)
    regions = [10_000_000, 20_000_000]
    where = ends - rows * stride
    one, other = (where, stride), (where + 90_000_000, stride)
    tiles = CopyTable(region.astype(np.int32), one[0], one[1], other[0], other[1], rows, size)
    groups = np.sort(random.integers(0, count + 1, 4))
    counts = np.diff(np.concatenate([[0], groups, [count]]))
    room = 24 << 10
    frames = broadcast_frames(counts, rows * size, room)
    buffers, headers = [1_000_000, 2_000_000], 5_000_000
    copies = packed_copies(tiles, frames, buffers, regions if sends else None, ALIGNMENT, headers)
    assert len(copies) == len(frames)
    memory = np.array(regions)[region] + where if sends else other[0]
    seen: list[tuple[int, int, int]] = []
    for sequence, (copy, (number, offset, first, last, nbytes)) in enumerate(zip(copies, frames.tolist(), strict=True)):
        assert first - offset == 0 or frames[sequence - 1, 0] == number or offset == first
        buffer = buffers[sequence % 2]
        inside, outside = (copy.target, copy.source) if sends else (copy.source, copy.target)
        assert (inside[0], outside[0], copy.row_bytes[0], copy.rows[0]) == (buffer, headers + 64 * sequence, 64, 1)
        end = buffer + 512
        for place, tile in enumerate(range(first, last), 1):
            assert inside[place] == end
            assert inside[place] % 512 == buffer % 512
            assert copy.row_bytes[place] == (copy.target_stride if sends else copy.source_stride)[place]
            end += -(-int(size[tile] * rows[tile]) // 512) * 512
            across = (copy.source_stride if sends else copy.target_stride)[place]
            assert (outside[place], across, copy.rows[place]) == (memory[tile], stride[tile], rows[tile])
            seen.append((int(memory[tile]), int(rows[tile]), int(copy.row_bytes[place])))
        assert nbytes == end - buffer - 512
        assert 512 + nbytes <= room
    assert seen == [(int(memory[tile]), int(rows[tile]), int(size[tile])) for tile in range(count)]
    assert frames_of_groups(frames, len(counts))[-1][1] == len(frames)
    for group, (first, end) in enumerate(frames_of_groups(frames, len(counts))):
        assert set(frames[first:end, 0].tolist()) <= {group}


def test_a_tile_that_does_not_fit_a_buffer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not fit buffers of 1,024"):
        broadcast_frames(np.array([1]), np.array([1024]), 1024)
