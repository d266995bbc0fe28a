"""Holds that a person sees whom a call waits for: in the log, and on a terminal that does not show the log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from weightsync.protocol.notices import tell


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "log_to", "printed"),
    [
        (Terminal(), io.StringIO(), True),  # the log goes to a file
        (Terminal(), Terminal(), False),  # the log is on the terminal
        (io.StringIO(), io.StringIO(), False),  # there is no terminal
    ],
)
def test_a_notice_is_seen_once(stderr: io.StringIO, log_to: io.StringIO, printed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger(f"notices of {id(stderr)}")
    log.propagate = False
    log.addHandler(logging.StreamHandler(log_to))
    monkeypatch.setattr(sys, "stderr", stderr)
    tell(log, "waiting for\x1b[2J somebody")
    assert log_to.getvalue() == "waiting for?[2J somebody\n"
    assert stderr.getvalue() == ("weightsync: waiting for?[2J somebody\n" if printed else "")


def test_no_standard_error_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    tell(logging.getLogger("notices without a terminal"), "waiting")
