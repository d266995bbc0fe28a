"""The demo as users run it, in its smallest form: it is right, and whatever ends it, nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import pytest

pytestmark = pytest.mark.slow

SMALLEST = ["--trainer-ranks", "1", "--replicas", "1", "--versions", "2", "--steps", "2", "--json"]


def named_shared_memory() -> set[str]:
    """All but the semaphores of Python's multiprocessing, which the demo does not use and other programs here make and drop."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def mapped_shared_memory() -> set[str]:
    """Of that, what a process of this machine has mapped."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
        mapped |= {line.partition("/dev/shm/")[2].removesuffix(" (deleted)") for line in lines if "/dev/shm/" in line}
    return mapped


class Run:
    """A demo in a process of its own. Its temporary files go to ``directory``, by which its processes are also recognised."""

    def __init__(self, directory: Path, *more: str) -> None:
        self.directory = directory
        self.shared_memory = named_shared_memory()
        environment = {**os.environ, "TMPDIR": str(directory)}
        command = [sys.executable, "-m", "examples.demo", *SMALLEST, *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self.log = ""

    def read_until(self, text: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if text in line:
                return line
        raise AssertionError(f"{text!r} never came:\n{self.log}")

    def processes(self) -> list[int]:
        mark = f"TMPDIR={self.directory}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def check_nothing_is_left(self) -> None:
        until = time.monotonic() + 10  # a killed parent's children end a moment later
        while self.processes() and time.monotonic() < until:
            os.sched_yield()
        assert self.processes() == [], self.log
        # torch makes an empty folder for its compiler when Transformers is imported; everything else would be ours
        assert [path for path in self.directory.iterdir() if not path.name.startswith("torchinductor_")] == []
        # The demo's processes have ended: what is still mapped is another program's.
        left = named_shared_memory() - self.shared_memory - mapped_shared_memory()
        assert not left & named_shared_memory()

    def close(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        streams: tuple[IO[str] | None, ...] = (self.process.stdout, self.process.stderr)
        for stream in streams:
            if stream is not None:
                stream.close()


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Run]:
    def begin(*more: str) -> Run:
        found = Run(tmp_path, *more)
        request.addfinalizer(found.close)
        return found

    return begin


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "more",
    [
        ["--adapters", "2", "--replicas", "2"],
        pytest.param([], marks=pytest.mark.rare),
        pytest.param(
            ["--transport", "shared_memory", "--delivery", "streamed", "--model", "qwen2", "--untied"], marks=pytest.mark.rare
        ),
    ],
    ids=["adapters", "smallest", "streamed"],
)
def test_every_answer_is_right(start: Callable[..., Run], more: list[str]) -> None:
    run = start(*more)
    out, errors = run.process.communicate(timeout=170)
    assert run.process.returncode == 0, errors
    assert len(out.splitlines()) == 1  # everything for people went to standard error
    found = json.loads(out)
    assert found["ok"] is True
    assert found["versions"] == 2
    assert found["trainer_ranks"] == 1
    assert found["engine"] == "transformers"
    assert found["delivery"] == ("streamed" if "streamed" in more else "direct")
    assert found["tokens_match"] is True
    assert (found["torn_responses"], found["mislabelled_responses"]) == (0, 0)
    assert found["responses_checked"] > 6  # more than the probes alone
    assert found["requests_served"] >= found["responses_checked"]
    assert found["bytes_per_version"] > 2_000_000
    names = ["replica-0", "replica-1"] if "--adapters" in more else ["replica-0"]
    digest = found["trainer_digest"]
    assert found["replicas"] == [{"name": name, "state": "loaded", "version": 2, "digest": digest} for name in names]
    assert "every token came from the version on its label" in errors
    if "--adapters" in more:
        adapters = found["adapters"]
        assert (adapters["names"], adapters["versions"], adapters["wrong_answers"], adapters["failed_requests"]) == (2, 4, 0, 0)
        assert adapters["answers"] >= 8, "a probe of every version in every replica"
        assert adapters["longest_publish_ms"] > 0
        assert len(adapters["resident_mib"]) == 2
        assert min(adapters["resident_mib"]) > 100
        assert "tenant-1/style@2 serves in 2 replicas" in errors
    run.check_nothing_is_left()


@pytest.mark.rare
@pytest.mark.timeout(240)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_deltas_go_to_one_replica_all_bytes_to_another_and_a_third_joins_from_the_store_after_the_trainers_end(
    start: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory, optimizer: str
) -> None:
    rates = ["--learning-rate", "1e-6", "--optimizer", optimizer, "--steps", "1"]
    store = ["--store", str(tmp_path_factory.mktemp("versions")), "--kill-trainer"]
    run = start("--deltas", "--replicas", "2", "--versions", "3", *rates, *store)
    out, errors = run.process.communicate(timeout=230)
    assert run.process.returncode == 0, errors
    found = json.loads(out)
    assert found["ok"] is True and found["tokens_match"] is True
    assert [change["version"] for change in found["changes"]] == [2, 3]
    for change in found["changes"]:
        assert 0 < change["changed"] < 0.2
        assert 0 < change["bytes"] < change["dense_bytes"] / 2
        assert min(change["paused_ms"], change["dense_paused_ms"]) > 0
    assert "% changed" in errors
    assert found["joined"] == {"name": "replica-2", "state": "loaded", "version": 3, "digest": found["trainer_digest"]}
    assert "joined from the store" in errors
    run.check_nothing_is_left()


@pytest.mark.rare
@pytest.mark.timeout(240)
@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-core is not installed here")
def test_a_model_that_megatron_trains_is_served_version_by_version(start: Callable[..., Run]) -> None:
    run = start("--trainer", "megatron", "--trainer-ranks", "2", "--replicas", "2", "--versions", "3", "--steps", "6")
    out, errors = run.process.communicate(timeout=230)
    assert run.process.returncode == 0, errors
    found = json.loads(out)
    assert (found["ok"], found["versions"], found["trainer_ranks"], found["tokens_match"]) == (True, 3, 2, True)
    assert (found["torn_responses"], found["mislabelled_responses"]) == (0, 0)
    assert [replica["version"] for replica in found["replicas"]] == [3, 3]
    run.check_nothing_is_left()


@pytest.mark.timeout(150)
def test_an_interrupt_in_the_middle_leaves_nothing(start: Callable[..., Run]) -> None:
    run = start("--versions", "100")
    run.read_until("round 1")
    assert len(run.processes()) >= 5  # itself, the janitor, the coordinator, a trainer, a replica
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130
    run.check_nothing_is_left()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.rare), signal.SIGKILL])
def test_an_early_end_leaves_nothing(start: Callable[..., Run], number: signal.Signals) -> None:
    run = start()
    run.read_until("coordinator at")
    run.process.send_signal(number)
    assert run.process.wait(20) == (-number if number == signal.SIGKILL else 130)
    run.check_nothing_is_left()
