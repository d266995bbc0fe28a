"""Does what the tutorial says, with its own programs in processes of their own."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.integration.fork_server import Child
from typer.testing import CliRunner

from weightsync.cli.main import app as cli
from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PAGE = (Path(__file__).parents[3] / "docs" / "tutorial.md").read_text()


class Terminal(Child):
    """One of the reader's terminals. Its program starts at once, because a fork server has imported torch."""

    def __init__(self, program: Path, environment: dict[str, str]) -> None:
        super().__init__(__name__, json.dumps([str(program), environment]))

    def read_until(self, text: str) -> str:
        """The first line with this text."""
        lines = []
        for line in self.output:
            lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended without {text!r}: {lines}")

    def close(self) -> None:
        self.kill()
        super().close()


def main() -> None:
    """Run one of the page's programs."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell that starts tests in the background ignores it for all of them
    program, environment = json.loads(sys.argv[1])
    os.environ.update(environment)
    runpy.run_path(program)


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    programs = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
    assert set(programs) == {"trainer.py", "engine.py"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    with ExitStack() as owned:
        server = owned.enter_context(BackgroundServer(ServerSettings(port=0, state_dir="off")))
        environment = {"WEIGHTSYNC_COORDINATOR": server.url, "WEIGHTSYNC_TOKEN": server.token, "PYTHONUNBUFFERED": "1"}

        def terminal(program: str, replica: str = "") -> Terminal:
            return owned.enter_context(closing(Terminal(tmp_path / program, environment | {"WEIGHTSYNC_REPLICA": replica})))

        trainer = terminal("trainer.py")
        trainer.read_until("waiting for an engine")
        first, second = (terminal("engine.py", f"policy-{index}") for index in range(2))
        assert first.read_until("@0 [") == second.read_until("@0 [")
        trainer.type("\n")
        assert first.read_until("@1 [") == second.read_until("@1 [")

        os.kill(second.pid, signal.SIGQUIT)
        assert second.output.read() == ""
        trainer.type("\n")
        served = first.read_until("@2 [")
        missed = trainer.read_until("not updated: policy")
        assert re.search(r"policy-1 \(lost: (\w+: )?PeerLost", missed), missed  # noticed before the round, or in one of its phases
        again = terminal("engine.py", "policy-1")
        assert again.read_until("@2 [") == served

        commands = re.findall(r"^weightsync ((?:status|rounds|trace).*)$", PAGE, re.MULTILINE)
        assert len(commands) == 3
        runner = CliRunner(env={"WEIGHTSYNC_COORDINATOR": server.url, "WEIGHTSYNC_TOKEN": server.token, "COLUMNS": "120"})
        shown = [runner.invoke(cli, command.replace("round.json", str(tmp_path / "round.json")).split()) for command in commands]
        assert [(done.exit_code, bool(done.output)) for done in shown] == [(0, True)] * 3
        assert re.search(r"policy-1 +serving +2 ", shown[0].output)
        assert "policy-1" in (tmp_path / "round.json").read_text()
        trainer.type("q\n")
        assert "Error" not in trainer.output.read()
