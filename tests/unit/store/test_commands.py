"""``weightsync store``, as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.store.stored import RUN, StoringTrainer, change, small_state
from typer.testing import CliRunner

from weightsync.cli.main import app
from weightsync.store.catalog import manifest_path, orders

Run = Callable[..., Any]


@pytest.fixture
def trainer(tmp_path: Path) -> StoringTrainer:
    state = small_state()
    trainer = StoringTrainer(tmp_path / "store", state)
    for number in range(3):
        change(state, 0.01, number)
        trainer.publish(number)
    return trainer


@pytest.fixture
def run(trainer: StoringTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("WEIGHTSYNC_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("WEIGHTSYNC_STORE_PUBLIC_KEY", trainer.key.public_text)
    monkeypatch.setenv("WEIGHTSYNC_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "250")

    def run(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["store", *arguments])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in arguments and not code else result.output

    return run


def test_versions_are_listed(run: Run) -> None:
    found = run("ls", "--json")
    assert [row["version"] for row in found["versions"]] == [f"{RUN}@{number}" for number in range(3)]
    assert [row["step"] for row in found["versions"]] == [0, 10, 20]
    assert found["versions"][2]["needed_bytes"] > found["versions"][2]["written_bytes"]
    text = run("ls")
    assert f"{RUN}@2" in text and "key frame" in text


def test_one_version_is_shown(run: Run) -> None:
    found = run("show", "1", "--json")
    assert found["version"] == f"{RUN}@1" and found["tensors"] == 5
    assert [one["kind"] for one in found["object_list"]] == ["key", "delta"]
    assert "delta" in run("show", f"{RUN}@1")
    assert "no version of run" in run("show", "other@1", code=2)
    assert "digest " in run("show", "1")
    for command in ("show", "verify"):
        assert f"there is no version {RUN}@17 in " in run(command, "17", code=1)


def test_a_version_is_verified(run: Run, trainer: StoringTrainer, tmp_path: Path) -> None:
    assert run("verify", "--json")["ok"]
    assert "is what was published: 5 tensors" in run("verify", "0")
    delta = next((tmp_path / "store").rglob("1.2.0-*.safetensors"))
    content = bytearray(delta.read_bytes())
    content[-1] ^= 1
    delta.write_bytes(content)
    assert "it was changed" in run("verify", code=1)
    assert run("verify", "1", "--json")["ok"]


def test_a_forged_version_is_shown_as_such(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "store" / manifest_path(RUN, (1, 1))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    errors = [row.get("error", "") for row in run("ls", "--json")["versions"]]
    assert errors[0] == errors[2] == "" and "not signed" in errors[1]
    assert "not signed" in run("ls").replace("\n", " ")
    assert "not signed" in run("verify", "1", code=2)
    assert "not signed" in run("ls", "--key", "A" * 43)


def test_old_versions_are_removed(run: Run, trainer: StoringTrainer) -> None:
    planned = run("gc", "--keep", "1", "--grace", "0", "--dry-run", "--json")
    assert planned["versions"] == [f"{RUN}@0", f"{RUN}@1"] and planned["dry_run"]
    assert len(orders(trainer.store, RUN)) == 3
    later = run("gc", "--keep", "3", "--json")
    assert later["young"] == 0
    (Path(trainer.store.url) / RUN / "objects" / "1.9.0-left.safetensors").touch()
    assert "1 unneeded objects are younger than 3600 s: run gc again later" in run("gc", "--keep", "3")
    assert "removed 2 versions" in run("gc", "--keep", "1", "--grace", "0")
    assert orders(trainer.store, RUN) == [(1, 2)]
    assert run("verify", "--json")["ok"]


def test_a_version_is_exported(run: Run, tmp_path: Path) -> None:
    found = run("export", str(tmp_path / "out"), "1", "--json")
    assert found["version"] == f"{RUN}@1"
    assert {Path(name).name for name in found["files"]} == {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    assert "has a checkpoint already" in run("export", str(tmp_path / "out"), code=2)
    assert "weightsync store export ./checkpoint 2" in run("export", "2", code=2)


def test_the_key_is_found_where_the_coordinator_ran(
    run: Run, trainer: StoringTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    from weightsync.config import ServerSettings
    from weightsync.server.store_key import store_key

    monkeypatch.delenv("WEIGHTSYNC_STORE_PUBLIC_KEY")
    folder = tmp_path / "state"
    assert f"no key of run a-run is in the state folder ({folder}): give --key or" in run("ls", code=2)
    for options in ((), ("--run", RUN)):
        assert "run this as the coordinator's user, with its WEIGHTSYNC_STATE_DIR" in run("key", *options, code=2)
    key = store_key(ServerSettings.load(), RUN)
    assert run("key").strip() == key.public_text
    with monkeypatch.context() as elsewhere:  # a coordinator's host may not reach the store
        elsewhere.delenv("WEIGHTSYNC_STORE")
        assert run("key", "--run", RUN).strip() == key.public_text
    wrong = run("verify", code=2)
    assert key.public_text in wrong and "compare it with what `weightsync store key` prints at home" in wrong
    assert "not signed" in wrong  # this store was signed by another key


def test_what_is_missing_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"there is no folder {tmp_path / 'empty'}" in run("ls", "--store", str(tmp_path / "empty"), code=2)
    assert not (tmp_path / "empty").exists()  # looking makes no folder
    assert f"has no version of run another, but of {RUN}" in run("verify", "--run", "another", code=2)
    (tmp_path / "new").mkdir()
    assert "has no versions: is it the trainer's?" in run("ls", "--store", str(tmp_path / "new"), code=2)
    monkeypatch.delenv("WEIGHTSYNC_STORE")
    assert "which store?" in run("ls", code=2)
