"""What agents say of themselves is text to a terminal: no markup, no escape sequences."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from weightsync.cli.tables import event_line, round_view, status_view
from weightsync.coordinator.events import Joined, Left, ReplicaEnded
from weightsync.coordinator.status import RankStatus, ReplicaStatus, Status
from weightsync.model import Version
from weightsync.protocol.messages import ReplicaResult, RoundResult

EVIL = "[/nope][bold]\x1b]0;OWNED\x07\x1b[2J\r\nforged"


def printed(view: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=400, force_terminal=False)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


RESULT = RoundResult(
    1,
    Version("run", 1, "0" * 32, "0" * 16),
    False,
    1,
    1.0,
    {},
    (ReplicaResult(EVIL, EVIL, 1, EVIL, 1, EVIL, (EVIL, EVIL), EVIL, {"agree": 0.1}, 0.1, EVIL),),
    EVIL,
)
STATUS = Status(
    run=EVIL,
    last=1,
    version=Version(EVIL, 1, EVIL, EVIL),
    busy=True,
    trainer_world_size=1,
    trainer=(),
    replicas=(ReplicaStatus(EVIL, EVIL, False, 1, EVIL, 1, 0.0, 4096, (1, 2), (RankStatus(EVIL, 0, EVIL, 7),), EVIL, EVIL, {}),),
    rounds=(RESULT,),
)


@pytest.mark.parametrize("view", [status_view(STATUS), round_view(RESULT)])
def test_no_view_obeys_what_it_shows(view: RenderableType) -> None:
    shown = printed(view)
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[/nope][bold]\\x1b]0;OWNED" in shown
    assert not [line for line in shown.splitlines() if line.startswith("forged")]


def test_ranks_that_are_missing_are_counted() -> None:
    assert "ranks 1, 2 and 4,093 more are not connected" in printed(status_view(STATUS))


def test_an_event_is_one_line() -> None:
    for event in (Joined(EVIL), Left(EVIL, EVIL), ReplicaEnded(1, RESULT.replicas[0])):
        line = event_line(event)
        assert line.isprintable()
        assert "OWNED" in line
