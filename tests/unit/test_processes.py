"""A child process answers by lines within deadlines; what a failed test has started ends with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.processes import ChildProcess, none_outlives

pytestmark = pytest.mark.usefixtures("no_leaks")

_WORKER = "import sys, time; print('here', flush=True); time.sleep(600)"
_LAUNCHER = f"""
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", {_WORKER!r}], stdout=subprocess.PIPE, start_new_session=True)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_in_sessions_of_their_own_do_not_outlive_their_test() -> None:
    worker = 0
    with pytest.raises(TimeoutError), none_outlives():
        with ChildProcess("-c", _LAUNCHER) as launcher:
            worker = int(launcher.line())
            launcher.kill()
        os.kill(worker, 0)
        raise TimeoutError
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_what_an_inner_block_leaves_behind_ends_with_the_outer_one() -> None:
    """So did an engine core whose server, started before the inner block, was killed in it: it ran on until the tests ended."""
    with none_outlives():
        with ChildProcess("-c", _LAUNCHER) as launcher:
            worker = int(launcher.line())
            with none_outlives():
                pass
            launcher.kill()
        os.kill(worker, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_reads_and_prints_lines_and_ends_with_its_input() -> None:
    program = """
import os, sys
print(os.environ["GIVEN"])
for line in sys.stdin:
    print(len(line), line[:3].strip())
sys.exit(7)
"""
    with ChildProcess("-c", program, environment={"GIVEN": "here"}) as child:
        child.expect("here")
        assert child.ask("yes") == "4 yes"
        assert child.ask("x" * 300_000) == "300001 xxx"  # more than a pipe holds
        with pytest.raises(AssertionError, match="'1 ' instead of 'no'"):
            child.write()
            child.expect("no")
        assert child.end() == 7
        assert child.printed == "here\n4 yes\n300001 xxx\n1 \n"
        with pytest.raises(AssertionError, match="exit code 7"):
            child.output()
    with ChildProcess("-c", "import tests.processes, weightsync; print('x' * 300_000)") as child:
        assert child.output() == "x" * 300_000 + "\n"  # what no test has read does not hold it up


def test_a_line_that_never_comes_is_an_error_that_shows_what_came() -> None:
    with ChildProcess("-c", "import time; print('almost there'); time.sleep(600)") as child:
        child.expect("almost there")
        began = time.monotonic()
        with pytest.raises(AssertionError, match=r"(?s)no line within 0\.2 s.*almost there"):
            child.line(0.2)
        with pytest.raises(AssertionError, match=r"(?s)did not read 'yy.* within 0\.2 s.*almost there"):
            child.write("y" * 300_000, timeout=0.2)
        assert time.monotonic() - began < 5
    assert gone(child.pid)


def test_a_process_that_dies_ends_all_waiting_at_once() -> None:
    with ChildProcess("-c", "import sys; print('last words'); sys.stdin.readline(); sys.exit(3)") as child:
        child.expect("last words")
        with pytest.raises(AssertionError, match=r"(?s)no more lines, exit code 3.*last words"):
            child.ask("go")
        with pytest.raises(AssertionError, match="no more lines, exit code 3"):
            child.line()
        with pytest.raises(AssertionError, match=r"(?s)cannot read 'on', exit code 3.*last words"):
            child.write("on")


def test_a_process_that_ignores_sigterm_and_the_end_of_its_input_is_killed_with_what_it_started() -> None:
    program = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started")
signal.pause()
"""
    with pytest.raises(AssertionError, match=r"did not end within 0\.2 s"), ChildProcess("-c", program) as child:
        child.expect("started")
        child.send_signal(signal.SIGTERM)
        with pytest.raises(AssertionError, match="did not end"):
            child.exit_code(0.2)
        child.end(0.2)
    assert child.exit_code() == -signal.SIGKILL
    assert gone(child.pid)  # and what it started: it would hold the output open
