"""The transport of the guide "write a transport", taken from the page, passes the contract: so a stranger's can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from weightsync_testing.transport_contract import TransportContract, nothing_left

__all__ = ["nothing_left"]

ROOT = Path(__file__).resolve().parents[3]


class TestGuide(TransportContract):
    where = "tests.contract.transports.guide_unix:Unix"


def test_a_killed_owner_leaves_no_file(tmp_path: Path) -> None:
    """A socket with a name in the file system would outlive it."""
    serve = (
        "import os; from tests.contract.transports.guide_unix import Unix; "
        "from weightsync.transports.host.region import PublishedRegion; "
        "from weightsync.transports.hostinfo import this_host; region = PublishedRegion(4096, 'l' * 32); "
        "owner = Unix().publish(region, b'k' * 32, this_host()); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", serve], cwd=ROOT, env=environment, timeout=50, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
