"""SIGTERM to a trainer and to an engine: with the handler of the page on launchers they leave; without it they are lost."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.fork_server import Child

from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.coordinator.events import Left
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer

pytestmark = pytest.mark.timeout(120)

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "launchers.md").read_text()
PROGRAM = """
import signal, torch, weightsync
model = torch.nn.Linear(4, 2)
with {}:
    print("ready", flush=True)
    signal.pause()
"""
PARTIES = {
    "policy-0/0": "weightsync.Engine(weightsync.ModuleAdapter(model), 'policy-0')",
    "trainer/0": "weightsync.Trainer(model)",
}


def handler() -> str:
    """The block of code under "Stop cleanly"."""
    section = PAGE.partition("## Stop cleanly")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert "SIGTERM" in block
    return str(block)


def main() -> None:
    """Run a program in the environment that the test chose."""
    program, environment = json.loads(sys.argv[1])
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exec(program, {"__name__": "__main__"})


@pytest.mark.parametrize("handled", [True, False], ids=["handled", "default"])
@pytest.mark.parametrize("member", PARTIES)
def test_sigterm_is_a_clean_leave_if_it_ends_the_blocks(member: str, handled: bool) -> None:
    program = (handler() if handled else "") + PROGRAM.format(PARTIES[member])
    with BackgroundServer(ServerSettings(port=0, state_dir="off")) as server:
        environment = {"WEIGHTSYNC_COORDINATOR": server.url, "WEIGHTSYNC_TOKEN": server.token}
        settings = ClientSettings(coordinator=server.address, token=Secret(server.token))
        child = Child(__name__, json.dumps([program, environment]))
        with closing(child), Client(settings) as client, client.events() as events:
            assert child.output.readline() == "ready\n"
            os.kill(child.pid, signal.SIGTERM)
            left = next(event for event in events if isinstance(event, Left))
            status = client.status()
    assert left.member == member
    assert ("closed" in left.reason) == handled, left.reason
    assert [alert.kind for alert in status.alerts] == ([] if handled else ["lost"])
    assert "lost" not in [replica.state for replica in status.replicas] or not handled
