"""Holds the order of a push: everything that can be looked at beforehand is, and only then are engines paused."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, DeadlineExceeded, ManifestMismatch, WeightSyncError
from weightsync.external.checkpoint_files import CheckpointFiles
from weightsync.external.clients.http import HttpCall
from weightsync.model import Manifest, PauseMode, TensorSpec
from weightsync_disaggregated import push as pushing
from weightsync_disaggregated.clients.base import Bucket, UpdateClient
from weightsync_disaggregated.push import push


class Recorded(UpdateClient):
    """An engine that takes everything, but for what ``refuse`` says."""

    engine = "recorded"

    def __init__(self, refuse: Mapping[str, WeightSyncError] | None = None) -> None:
        super().__init__("http://127.0.0.1:1")
        self.calls: list[str] = []
        self.limits: tuple[float, float | None] = (0.0, None)
        self._refuse = refuse or {}

    def _init(self, wish: object) -> HttpCall:
        return HttpCall("POST", "/")

    def _destroy(self) -> HttpCall:
        return HttpCall("POST", "/")

    def _bucket(self, specs: object, last: bool) -> HttpCall:
        return HttpCall("POST", "/")

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self._refuse:
            raise self._refuse[name]

    def check(self, manifest: Manifest, label: str | None, deadline: Deadline) -> None:
        self._note("check")

    def join(self, deadline: Deadline) -> None:
        self._note("join")

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        self._note("pause")

    def begin(self, label: str | None, fingerprint: str | None, deadline: Deadline, whole: Deadline | None = None) -> None:
        self.limits = deadline.seconds, None if whole is None else whole.seconds
        self._note("begin")

    def update(self, bucket: Bucket, last: bool, deadline: Deadline) -> None:
        self._note("update")

    def commit(self, digests: Mapping[str, str], deadline: Deadline) -> str:
        self._note("commit")
        return "done"

    def flush(self, deadline: Deadline) -> None:
        self._note("flush")

    def resume(self, deadline: Deadline) -> None:
        self._note("resume")

    def version(self, deadline: Deadline) -> str | None:
        return None

    def abort(self, deadline: Deadline) -> None:
        self._note("abort")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_the_order_of_a_push(directory: Path) -> None:
    with CheckpointFiles(directory) as checkpoint, Recorded() as engine:
        (result,) = push(checkpoint, [engine], "1", bucket_bytes=16)
    assert result.ok
    assert engine.calls == ["check", "join", "pause", "begin", "update", "update", "commit", "flush", "resume"]


def test_beginning_is_a_step_and_the_engine_hears_how_long_all_of_it_may_take(directory: Path) -> None:
    with CheckpointFiles(directory) as checkpoint, Recorded() as engine:
        push(checkpoint, [engine], "1", timeout=100.0, step_timeout=7.0)
    assert engine.limits == (7.0, 100.0)


def test_an_engine_that_refuses_the_checkpoint_is_not_touched_and_the_others_are_updated(directory: Path) -> None:
    refusal = ManifestMismatch("other tensors")
    with CheckpointFiles(directory) as checkpoint, Recorded({"check": refusal}) as bad, Recorded() as good:
        one, other = push(checkpoint, [bad, good], "1")
    assert (one.ok, one.touched, one.answer) == (False, False, "ManifestMismatch: other tensors")
    assert bad.calls == ["check"]
    assert other.ok


def test_a_checkpoint_that_cannot_be_read_asks_nothing_of_any_engine(directory: Path) -> None:
    with CheckpointFiles(directory) as checkpoint, Recorded() as engine:
        (directory / "model.safetensors").write_bytes(b"")  # somebody made it shorter
        with pytest.raises(ConfigurationError, match="ended in the middle"):
            push(checkpoint, [engine], "1")
    assert engine.calls == []


def test_a_later_bucket_whose_reading_hangs_ends_in_time_and_the_engine_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, read = threading.Event(), CheckpointFiles.read

    def hangs(checkpoint: CheckpointFiles, specs: Sequence[TensorSpec], memory: npt.NDArray[np.uint8]) -> None:
        if specs[0].name == "b":
            assert goes_on.wait(20)
        read(checkpoint, specs, memory)

    monkeypatch.setattr(CheckpointFiles, "read", hangs)
    with CheckpointFiles(directory) as checkpoint, Recorded() as engine:
        try:
            with pytest.raises(DeadlineExceeded, match="reading bucket 2 of the checkpoint"):
                push(checkpoint, [engine], "1", bucket_bytes=16, step_timeout=0.3)
        finally:
            goes_on.set()
    assert engine.calls == ["check", "join", "pause", "begin", "update", "abort"]


@pytest.mark.parametrize("how", ["refused", "more than is free"])
def test_memory_that_is_not_there_is_an_error_before_any_engine_is_asked(
    directory: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def raises(*_: object) -> npt.NDArray[np.uint8]:
        raise MemoryError

    if how == "refused":
        monkeypatch.setattr(np, "empty", raises)
    else:
        monkeypatch.setattr(pushing, "available_bytes", lambda: 31)
    refused_so = pytest.raises(ConfigurationError, match=r"2 buckets of 16 bytes do not fit into memory.*--bucket")
    with CheckpointFiles(directory) as checkpoint, Recorded() as engine, refused_so:
        push(checkpoint, [engine], "1", bucket_bytes=16)
    assert engine.calls == []
