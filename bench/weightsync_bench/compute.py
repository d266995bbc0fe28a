"""Cases in one process: the digest compared to one read of memory, and planning compared to its time limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.protocol.messages import Host
from weightsync.tensors.digest import digest_rows
from weightsync.tensors.memory_layout import layout_in_place
from weightsync.tensors.shards import shards_of
from weightsync_bench.shapes import one_trillion, qwen3_30b_a3b
from weightsync_bench.sharding import expert_parallel, fsdp, tensor_parallel


class Case(msgspec.Struct, frozen=True):
    """Result of one case. ``ratio`` is ``seconds / floor_seconds``, and ``goal`` is the required ratio."""

    name: str
    bytes: int
    seconds: float
    floor: str
    floor_seconds: float
    ratio: float
    goal: float | None = None
    publish_seconds: float | None = None
    """Duration of the whole ``publish`` call, including the phases before the pause (agree, place)."""
    publish_ratio: float | None = None
    """``publish_seconds`` over its own floor, which for shared memory includes the copy to the published region."""
    phases: dict[str, float] = {}
    rounds: int = 1
    ratio_lowest: float | None = None
    ratio_highest: float | None = None
    """Extremes over the rounds, each relative to the floor measured just before it."""
    processor_ratio: float | None = None
    """CPU time of the engine ranks in a round over that of their part of the floor. Other programs affect it little."""
    waited_share: float | None = None
    """Largest share of a round that an engine rank waited for a CPU. Near zero on an idle machine."""


def _timed(work: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _digest(name: str, size: int) -> Case:
    weight = torch.randint(-(2**15), 2**15, (size // 2048, 1024), dtype=torch.int16).view(torch.bfloat16)
    manifest, shards = shards_of({"weight": weight})
    layout, addresses = layout_in_place(manifest, shards)
    out = np.zeros(len(layout), np.uint64)
    words = weight.view(torch.int16).numpy().view(np.uint64)
    digest_rows(manifest, layout, addresses, 0, len(layout), out)  # compile it, or load it from the cache, before the measurement
    seconds = _timed(lambda: digest_rows(manifest, layout, addresses, 0, len(layout), out), 5)
    floor_seconds = _timed(lambda: np.add.reduce(words, axis=None), 5)
    # The goal is 2 GB/s for each core, expressed as a ratio to the measured read.
    goal = (manifest.nbytes / 2e9) / floor_seconds
    return Case(name, manifest.nbytes, seconds, "one read of the same bytes (a sum)", floor_seconds, seconds / floor_seconds, goal)


def _plan(
    name: str, specs: Sequence[TensorSpec], sources: int, targets: Callable[[Manifest], list[Layout]], goal_seconds: float
) -> Case:
    manifest = Manifest(specs)
    hosts = [Host(f"host-{index // 8}", f"host-{index // 8}") for index in range(sources)]
    held = [SourceRank(f"trainer-{index}", hosts[index], layout) for index, layout in enumerate(fsdp(manifest, sources))]
    wanted = [TargetRank(f"engine-{index}", hosts[index % len(hosts)], layout) for index, layout in enumerate(targets(manifest))]

    def plan() -> None:
        made = plan_transfer(manifest, held, wanted)
        for target in wanted:
            made.pieces(target.member)

    seconds = _timed(plan, 3)
    return Case(name, manifest.nbytes, seconds, "the time limit", goal_seconds, seconds / goal_seconds, 1.0)


_CASES: dict[str, Callable[[str, int], Case]] = {
    "digest/bfloat16/1": _digest,
    "plan/qwen3-30b-a3b/fsdp8-tp8": lambda name, _: _plan(
        name, qwen3_30b_a3b(), 8, lambda manifest: tensor_parallel(manifest, 8), 0.5
    ),
    "plan/qwen3-30b-a3b/fsdp8-ep8": lambda name, _: _plan(
        name, qwen3_30b_a3b(), 8, lambda manifest: expert_parallel(manifest, 8), 0.5
    ),
    "plan/one-trillion/fsdp256-ep16": lambda name, _: _plan(
        name, one_trillion(), 256, lambda manifest: expert_parallel(manifest, 16), 20.0
    ),
}

COMPUTE_CASES = tuple(_CASES)


def run_compute_case(name: str, size: int) -> Case:
    """Run one case of :data:`COMPUTE_CASES`. ``size`` is the number of bytes to digest."""
    return _CASES[name](name, size)
