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
