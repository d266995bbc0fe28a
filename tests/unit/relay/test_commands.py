"""``weightsync relay``, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.store.stored import RUN, StoringTrainer, small_state
from typer.testing import CliRunner

from weightsync.cli.commands import EXIT_UNREACHABLE
from weightsync.cli.main import app


def test_a_relay_says_by_what_it_has_its_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    monkeypatch.setenv("WEIGHTSYNC_STORE", str(tmp_path))
    monkeypatch.setenv("WEIGHTSYNC_STORE_PUBLIC_KEY", trainer.key.public_text)
    monkeypatch.setenv("WEIGHTSYNC_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", "http://127.0.0.1:1")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "t" * 43)
    monkeypatch.setenv("WEIGHTSYNC_CONNECT_TIMEOUT", "0.1")
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("weightsync_relay.commands.configure_logs", lambda *_: None)
    unset = "WEIGHTSYNC_COORDINATOR is set, so this relay starts no coordinator; unset it to have one here"
    done = CliRunner().invoke(app, ["relay", "--run", RUN])
    assert done.exit_code == EXIT_UNREACHABLE and unset in done.output
    done = CliRunner().invoke(app, ["relay", "--run", RUN, "--coordinator", "http://127.0.0.1:1"])
    assert done.exit_code == EXIT_UNREACHABLE and unset not in done.output
