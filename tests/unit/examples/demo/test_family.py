"""The demo's processes: heard, missed when they fail, gone at the end, however the end comes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from examples.demo.family import Family
from examples.demo.reports import Ready, Report

from weightsync.errors import PeerLost

MODULE = "child_of_the_demo"
CHILD = """
import os, signal, sys, time, msgspec
from weightsync.deadline import Deadline
from examples.demo.reports import Parent, Ready, die_with_parent
wish = msgspec.json.decode(sys.argv[1])
die_with_parent(wish["parent"])
parent = Parent()
print("not a report")
if wish["does"] == "stay":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
parent.tell(Ready("here"))
if wish["does"] == "fail":
    sys.exit("this is why")
if wish["does"] == "stay":
    signal.pause()
parent.wait_for_word(Deadline(20))
parent.tell(Ready("on it"))
"""


class Wish(msgspec.Struct):
    parent: int
    does: str


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / f"{MODULE}.py").write_text(CHILD)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(line.split()[1] for line in status if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (number - 1) & 1)


async def test_children_are_heard_and_told_to_go_on(environment: dict[str, str]) -> None:
    heard: list[Report] = []
    async with asyncio.timeout(40), Family(environment) as family:
        directory = family.directory
        child = await family.start("one", MODULE, Wish(os.getpid(), "go on"), heard.append)
        child.say()
        await family.guard(family.ended())
        assert heard == [Ready("here"), Ready("on it")]
        assert "not a report" in child.tail()
    assert not directory.exists()


async def test_a_child_that_fails_ends_the_work_and_its_log_is_quoted(environment: dict[str, str]) -> None:
    async with asyncio.timeout(40), Family(environment) as family:
        await family.start("bad", MODULE, Wish(os.getpid(), "fail"), lambda report: None)
        with pytest.raises(PeerLost, match=r"(?s)bad ended with status 1.*this is why"):
            await family.guard(asyncio.sleep(30))


async def test_a_child_that_is_killed_on_purpose_is_no_failure_and_its_name_is_free_again(environment: dict[str, str]) -> None:
    heard: list[Report] = []
    async with asyncio.timeout(40), Family(environment) as family:
        first = await family.start("one", MODULE, Wish(os.getpid(), "go on"), heard.append)
        await family.kill("one")
        assert first.process.returncode == -signal.SIGKILL
        again = await family.start("one", MODULE, Wish(os.getpid(), "go on"), heard.append)
        again.say()
        await family.guard(family.ended())
        assert again.process.pid != first.process.pid
        assert heard[-1] == Ready("on it")


async def test_a_child_that_ignores_sigterm_is_killed(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.demo.family._POLITE_SECONDS", 0.5)
    ready = asyncio.Event()
    async with asyncio.timeout(40), Family(environment) as family:
        stubborn = await family.start("stubborn", MODULE, Wish(os.getpid(), "stay"), lambda report: ready.set())
        await ready.wait()
    assert stubborn.process.returncode == -signal.SIGKILL


async def test_children_die_with_a_parent_that_is_not_theirs(environment: dict[str, str]) -> None:
    async with asyncio.timeout(40), Family(environment) as family:
        await family.start("orphan", MODULE, Wish(1, "stay"), lambda report: None)
        with pytest.raises(PeerLost, match="status 1"):
            await family.guard(asyncio.sleep(30))


@pytest.mark.parametrize("clean", [True, False])
def test_the_janitor_tidies_only_when_nobody_else_did(tmp_path: Path, clean: bool) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], process_group=0)
    directory = tmp_path / "things"
    directory.mkdir()
    words = f"group {victim.pid}\ndirectory {directory}\n" + "done\n" * clean
    try:
        subprocess.run([sys.executable, "-m", "examples.demo.janitor"], input=words, text=True, timeout=30, check=True)
        if clean:
            assert victim.poll() is None
            assert directory.exists()
        else:
            assert victim.wait(10) == -signal.SIGKILL
            assert not directory.exists()
    finally:
        victim.kill()
        victim.wait(10)


def test_the_janitor_outlives_the_signals_of_a_terminal(tmp_path: Path) -> None:
    janitor = subprocess.Popen([sys.executable, "-m", "examples.demo.janitor"], stdin=subprocess.PIPE, text=True)
    assert janitor.stdin is not None
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    janitor.stdin.write(f"directory {tmp_path / 'a'}\n")
    janitor.stdin.flush()
    until = time.monotonic() + 20
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    while not all(ignores(janitor.pid, number) for number in signals) and time.monotonic() < until:
        os.sched_yield()
    for number in signals:
        janitor.send_signal(number)
    janitor.stdin.write(f"directory {tmp_path / 'b'}\n")
    janitor.stdin.close()
    assert janitor.wait(20) == 0
    assert list(tmp_path.iterdir()) == []
