"""What every test may use: a printed seed, a check that nothing leaks, markers that skip with a reason, no stray processes."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import secrets
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from tests.processes import children

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores, several processes: more threads only fight
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, starves its workers beside other tests, for minutes

# Torch's stores ask the name server for the name of each peer, of 127.0.0.1 too. One that does not answer stops both ends for 5 s
# each time, which exceeds deadlines of tests. With no attempts, glibc asks nobody, also in child processes.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each such name would be a warning

# Coordinators of tests, also in child processes, must not add their rounds to the user's history.
# UCX opens each network device that there is, and fails if one is removed meanwhile: other tests make and remove theirs.
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ["WEIGHTSYNC_STATE_DIR"] = "off"
os.environ["WEIGHTSYNC_PORT"] = "0"  # tests run side by side: not all coordinators can have the default port

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, database=None)
hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
hypothesis.settings.load_profile(_PROFILE)

_SEED = int(os.environ.get("WEIGHTSYNC_TEST_SEED") or secrets.randbelow(1 << 32))
os.environ["WEIGHTSYNC_TEST_SEED"] = str(_SEED)  # pytest-xdist's workers take the same
_GRACE = 5.0
# Direct children that live as long as this process on purpose, and end with it. What they start is looked at all the same.

_strays = pytest.StashKey[list[str]]()


def pytest_report_header(config: pytest.Config) -> str:
    drawn = config.getoption("--hypothesis-seed", default=None)
    hypothesis_seed = "derandomized" if _PROFILE == "ci" else drawn if drawn is not None else "drawn (a failure prints its blob)"
    return f"weightsync: WEIGHTSYNC_TEST_SEED={_SEED}, HYPOTHESIS_PROFILE={_PROFILE}, hypothesis seed {hypothesis_seed}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none here"))
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="needs vLLM, which is not installed here"))


_MARKS_OF_FILE = re.compile(r"^pytestmark = (\[.*?\]|[^\n]+)", re.DOTALL | re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a wanted test are not imported: in each process that takes longer than many a test."""
    wanted = config.getoption("markexpr").split(" and ")
    if not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    without = wanted[0] == "vllm" and "mark.vllm" not in text
    marks = "".join(_MARKS_OF_FILE.findall(text))
    return True if without or any(f"mark.{one.removeprefix('not ')}" in marks for one in wanted if one.startswith("not ")) else None


def pytest_collection_finish() -> None:
    """What was imported lives on: without this, every look for leaks goes through a million such objects again, twice."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's seed: drawn once a session (``WEIGHTSYNC_TEST_SEED`` repeats it), different in every test, printed."""
    value = _SEED ^ zlib.crc32(request.node.nodeid.encode())
    print(f"seed {value} (WEIGHTSYNC_TEST_SEED={_SEED})")
    return value


def _held() -> set[str]:
    """What this process holds that a test could forget: threads, file descriptors, children, named shared memory."""
    held = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate() if thread.is_alive()}
    for link in Path("/proc/self/fd").iterdir():
        try:
            held.add(f"file descriptor {link.name} -> {os.readlink(link)}")
        except OSError:  # the one that lists this folder
            continue
    held |= {f"child process {pid}: {command}" for pid, command in children(os.getpid()).items()}
    if Path("/dev/shm").is_dir():
        held |= {f"shared memory {path}" for path in Path("/dev/shm").iterdir() if path.name.startswith("weightsync")}
    return held


@pytest.fixture(scope="module")
def first_gloo_group() -> None:
    """Gloo keeps a pipe from its first group on, for the life of the process; the fork server a socket."""
    from tests.integration.fork_server import FORK_SERVER

    from weightsync.deadline import Deadline
    from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group

    FORK_SERVER.start()
    rendezvous = StoreRendezvous("127.0.0.1", 1, Deadline(10))
    init_custom_process_group("gloo", 0, 1, "first", Deadline(10), rendezvous=rendezvous).close()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail the test if it leaves a thread, file descriptor, child process or shared memory that was not there before."""
    gc.collect()
    before = _held()
    yield
    until = time.monotonic() + _GRACE
    pause = threading.Event()
    while (left := _held() - before) and time.monotonic() < until:
        gc.collect()
        pause.wait(0.02)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(sorted(left)), pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if config.getoption("numprocesses", default=None) and not hasattr(config, "workerinput"):
        lines = config.stash.get(_strays, [])  # this process's own children are pytest-xdist's workers, which look at their own
    else:
        until, pause = time.monotonic() + _GRACE, threading.Event()
        while (strays := children(os.getpid())) and time.monotonic() < until:
            pause.wait(0.1)  # an engine core ends some time after its server
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        lines = [f"{pid}: {command}" for pid, command in strays.items()]
        config.stash[_strays] = lines
        if hasattr(config, "workeroutput"):
            config.workeroutput["strays"] = lines
    if lines and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist ended: what it had to kill fails the whole run, as it does without workers."""
    node.config.stash.setdefault(_strays, []).extend(getattr(node, "workeroutput", {}).get("strays", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_strays, []):
        terminalreporter.write_line(f"stray process killed, so this run fails: {line}", red=True)
