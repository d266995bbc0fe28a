"""What a failed test has started ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import none_outlives

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
        with subprocess.Popen([sys.executable, "-c", _LAUNCHER], stdout=subprocess.PIPE, start_new_session=True) as launcher:
            assert launcher.stdout is not None
            worker = int(launcher.stdout.readline())
            launcher.kill()
        os.kill(worker, 0)
        raise TimeoutError
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_what_an_inner_block_leaves_behind_ends_with_the_outer_one() -> None:
    """So did an engine core whose server, started before the inner block, was killed in it: it ran on until the tests ended."""
    with none_outlives():
        with subprocess.Popen([sys.executable, "-c", _LAUNCHER], stdout=subprocess.PIPE, start_new_session=True) as launcher:
            assert launcher.stdout is not None
            worker = int(launcher.stdout.readline())
            with none_outlives():
                pass
            launcher.kill()
        os.kill(worker, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
