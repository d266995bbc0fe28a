"""verl's own manager, actor workers (FSDP2) and checkpoint-engine workers in Ray, with weightsync by one line of configuration."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here")

import ray
import verl
from hydra import compose, initialize_config_module
from ray.exceptions import RayActorError
from tests.integration.verl_cluster import ROOT, Run, cluster
from verl.checkpoint_engine import CheckpointEngineRegistry

from weightsync.config import Address
from weightsync.errors import ConfigurationError, MembershipError
from weightsync.integrations.verl import backend
from weightsync.protocol.tokens import find_token

pytestmark = [
    pytest.mark.verl,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl's, Ray's and those of what they import
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="v-", ignore_cleanup_errors=True) as name, cluster(name):
        yield Path(name)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Run(folder, actors=2, rollouts=2)


def test_replicas_are_added_removed_and_killed_between_updates_and_the_others_hold_the_new_values(run: Run, folder: Path) -> None:
    first, second = run.manager.replicas
    expected = run.change(0)
    metrics = run.update(0)
    assert [taken for taken, _ in run.taken()] == [expected, expected]
    assert all("float32" in digest for digest in expected.values()), "the actor's own dtype, unless the option dtype says another"
    assert metrics["checkpoint_engine/rollout_ranks"] == 2

    (third,) = run.new_replicas(1)
    run.manager.add_replicas([third])
    newer = run.change(1)
    assert run.update(None)["checkpoint_engine/version"] == metrics["checkpoint_engine/version"] + 1
    assert [taken for taken, _ in run.taken()] == [newer, newer, newer]

    run.manager.remove_replicas([first])
    newest = run.change(2)
    assert run.update(7)["checkpoint_engine/rollout_ranks"] == 2
    assert run.taken() == [(newest, [0, None, 7]), (newest, [None, 7])]
    assert ray.get(first.workers[0].taken.remote()) == (newer, [0, None])

    ray.kill(second.workers[0])
    with pytest.raises(RayActorError):
        run.update(8)
    run.manager.remove_replicas([second])
    last = run.change(3)
    run.update(8)
    assert run.taken() == [(last, [None, 7, 8])]
    assert third.asked[-4:] == ["abort", "release", "resume cache", "resume"]

    metadata = ray.get(run.actors.execute_checkpoint_engine(["prepare"] * 2))
    token = find_token(Address.parse(metadata[0]["coordinator"]))
    assert token is not None
    assert token.reveal() not in str(metadata)
    session = folder / "session_latest"
    assert not [path for path in session.rglob("*") if path.is_file() and token.reveal().encode() in path.read_bytes()]


def test_the_example_of_the_guide_is_a_configuration_of_verl() -> None:
    page = (ROOT / "docs/integrations/verl.md").read_text()
    (command,) = re.findall(r"^python -m verl\.trainer\.main_ppo \\\n((?:    .*\n)+)", page, re.MULTILINE)
    options = re.findall(r"`(\+[\w.]+engine_kwargs\S+=\S+)`", page)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*command.replace("\\\n", " ").split(), *options])
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    assert (config.trainer.v1.trainer_mode, engine.backend) == ("separate_async", "weightsync")
    ours = CheckpointEngineRegistry.new(engine.backend, bucket_size=1 << 20, **engine.engine_kwargs.weightsync)
    assert isinstance(ours, backend.StreamCheckpointEngine)


def test_the_check_of_an_installation_finds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WEIGHTSYNC_", "VERL_"))]:
        monkeypatch.delenv(name)
    command = [sys.executable, "-m", "weightsync.integrations", "verl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line[9:22].strip(): line.split()[0] for line in done.stdout.splitlines() if line[0] != " "}
    fine = dict.fromkeys(["weightsync", "ray", "verl", "entry point", "backend", "coordinator"], "ok")
    assert found == {**fine, "token": "limited"}


def about(**values: object) -> dict[str, Any]:
    return {"name": "rollout", "host": "here", **values}


ACTOR = about(coordinator="http://127.0.0.1:7400", seconds=5.0)


@pytest.mark.parametrize(
    ("metadata", "error", "words"),
    [
        ([about(), about()], ConfigurationError, "is_master"),
        ([ACTOR], ConfigurationError, "verl passed 1 ranks"),
        ([ACTOR, about(host="there")], ConfigurationError, "WEIGHTSYNC_TOKEN_FILE"),
    ],
)
def test_what_cannot_work_is_refused_in_the_driver(metadata: list[dict[str, Any]], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        backend.StreamCheckpointEngine.build_topology(1, 1, metadata)


def test_two_rollout_ranks_of_one_name_are_refused_in_the_driver() -> None:
    with pytest.raises(MembershipError, match="one name: rollout"):
        backend.StreamCheckpointEngine.build_topology(1, 2, [ACTOR, about(), about()])


def test_an_unknown_release_is_used_if_its_interface_fits_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verl, "__version__", "1.3.0")
    monkeypatch.setattr(backend, "_release_named", False)
    with caplog.at_level(logging.WARNING, "weightsync"):
        for _ in range(2):
            actors, rollouts = backend.StreamCheckpointEngine.build_topology(1, 1, [ACTOR, about()])
    assert [len(values) for values in [*actors.values(), *rollouts.values()]] == [1] * 7
    assert [record.message for record in caplog.records if "1.3.0" in record.message] == [caplog.records[0].message]


def test_an_interface_that_asks_for_more_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = type("Newer", (backend.StreamCheckpointEngine,), {})
    monkeypatch.setattr(newer, "__abstractmethods__", frozenset({"rebalance"}))
    with pytest.raises(ConfigurationError, match="asks a checkpoint engine for rebalance"):
        newer(bucket_size=1)


@pytest.mark.parametrize("options", [{"dtyp": "bfloat16"}, {"dtype": "int8"}, {"timeout": 0}, {"transports": "tcp"}])
def test_a_wrong_option_is_an_error_that_names_the_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"engine_kwargs\.weightsync"):
        CheckpointEngineRegistry.new("weightsync", bucket_size=1, **options)
