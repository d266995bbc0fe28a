"""A stand-in for SGLang's scheduler, for tests without SGLang: its passes, its pause, its queue, and a model with a fused layer.

What it does is what the tests of ``tests/integration/sglang/test_sglang.py`` find in SGLang's own classes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from weightsync.closing import Closeable
from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.sglang.joining import SglangAdapter, install
from weightsync.engines.sglang.loop import SchedulerLoop, drop_caches
from weightsync.engines.traced_shards import DirectShards, find_direct
from weightsync.model import Manifest, TensorSpec
from weightsync.protocol.messages import Delivery

CHECKPOINT_SHAPES = {"q.weight": (4, 6), "k.weight": (2, 6), "norm.weight": (6,)}


@dataclass(frozen=True)
class Pause:
    mode: str = "retract"


@dataclass(frozen=True)
class Proceed:
    torch_empty_cache: bool = False


@dataclass(frozen=True)
class Abort:
    abort_all: bool = True


class Write:
    """A request that writes weights."""


def wake(tags: list[str]) -> tuple[str, ...]:
    return tuple(tags)


REQUESTS = SimpleNamespace(
    **dict.fromkeys(
        (
            "TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput", "BatchTokenizedGenerateReqInput",
            "BatchTokenizedEmbeddingReqInput",
        ),
        int,
    ),
    **dict.fromkeys(
        (
            "UpdateWeightFromDiskReqInput", "UpdateWeightsFromDistributedReqInput", "UpdateWeightsFromTensorReqInput",
            "UpdateWeightsFromIPCReqInput", "ReleaseMemoryOccupationReqInput",
        ),
        Write,
    ),
    PauseGenerationReqInput=Pause,
    ContinueGenerationReqInput=Proceed,
    AbortReq=Abort,
    ResumeMemoryOccupationReqInput=wake,
)  # fmt: skip
"""In the place of SGLang's module of requests."""


def checkpoint() -> HfCheckpoint:
    manifest = Manifest([TensorSpec(name, shape, "float32") for name, shape in CHECKPOINT_SHAPES.items()])
    return HfCheckpoint(manifest, tuple(CHECKPOINT_SHAPES))


class FusedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.randn(6, 6))
        self.norm = nn.Parameter(torch.randn(6))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm.weight":
                self.norm.data.copy_(tensor)
            elif name in CHECKPOINT_SHAPES:
                self.by_checkpoint()[name].copy_(tensor)

    def by_checkpoint(self) -> dict[str, torch.Tensor]:
        return {"q.weight": self.qk.data[:4], "k.weight": self.qk.data[4:], "norm.weight": self.norm.data}


class WeightUpdater:
    """The scheduler's updater of weights, and the runner's."""

    def __init__(self) -> None:
        self.offload_tags: set[str] = set()
        self.wakes: list[tuple[str, ...]] = []
        self.wake_fails = False

    def begin_weight_update(self) -> None:
        pass

    def end_weight_update(self, *, run_post_load: bool) -> None:
        pass

    def resume_memory_occupation(self, tags: tuple[str, ...]) -> None:
        if self.wake_fails:
            raise RuntimeError("out of memory")
        self.wakes.append(tags)
        self.offload_tags -= set(tags)


class StandInScheduler(Closeable):
    """Runs requests, which are numbers of steps that they take, on a thread of its own."""

    def __init__(self, *, leads: bool = True) -> None:
        self._engine_paused = False
        self.last_batch: object | None = None  # what the last pass computed
        self.model = FusedModel()
        self.weight_updater = WeightUpdater()
        self.runner = SimpleNamespace(model=self.model, weight_updater=self.weight_updater)
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.embeddings = {"image": 1}
        self.version, self.steps, self.flushes = "", 0, 0
        self.input: list[object] = []
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.ended: list[str] = []
        self.loop = SchedulerLoop(self, REQUESTS, leads=leads)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stand-in-scheduler")
        self._thread.start()

    def _run(self) -> None:
        with self.loop:
            while not self._closed:
                pulled, self.input = self.input, []
                self.loop.received(pulled)
                self.loop.pass_through(self._process, pulled)
                if not self._engine_paused:
                    self._step()

    def _process(self, requests: list[object]) -> None:
        for request in requests:
            if isinstance(request, Pause):
                self._engine_paused = True
                self.waiting, self.running = self.running + self.waiting, []
            elif isinstance(request, Abort):
                self.ended += ["aborted"] * len(self.waiting)
                self.waiting.clear()
            elif isinstance(request, Proceed):
                self._engine_paused = False
            elif isinstance(request, int):
                self.waiting.append(request)
            elif isinstance(request, Write):
                self.model.qk.data.zero_()
            else:
                raise ValueError(f"Invalid object: {request}")

    def _step(self) -> None:
        self.running += self.waiting
        self.waiting = []
        if self.running:
            self.running = [left - 1 for left in self.running]
            self.ended += ["finished" for left in self.running if left <= 0]
            self.running = [left for left in self.running if left > 0]
            self.steps += 1
        time.sleep(0.001)

    def is_fully_idle(self) -> bool:
        return not self.running and not self.waiting

    def flush_cache(self, empty_cache: bool = True) -> bool:
        self.flushes += 1
        return not self.running and not self.grammar_manager.grammar_queue

    def record_weight_version_change(self, new_version: str) -> None:
        self.version = new_version

    def close(self) -> None:
        self._closed = True
        self._thread.join(10.0)


def adapter_of(scheduler: StandInScheduler, delivery: Delivery = "streamed") -> SglangAdapter:
    reload = partial(install, scheduler.runner)
    direct: DirectShards | None = None
    if delivery == "direct":
        found = find_direct(scheduler.model, checkpoint().manifest, lambda tensors, layers: reload(tensors), torch.device("cpu"))
        assert isinstance(found, DirectShards)
        direct = found
    return SglangAdapter(
        checkpoint(), scheduler.loop, install=reload, flush=partial(drop_caches, scheduler, scheduler.embeddings),
        label=scheduler.record_weight_version_change, direct=direct,
    )  # fmt: skip
