"""verl's own manager, actor workers (FSDP2) and checkpoint-engine workers in Ray, with weightsync by one line of configuration."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here")

import ray
import verl
from hydra import compose, initialize_config_module
from ray.exceptions import RayActorError
from tests.integration.verl.verl_cluster import ROOT, Run, cluster
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.rollout import base as rollouts

from weightsync import releases
from weightsync.config import Address
from weightsync.errors import ConfigurationError, MembershipError
from weightsync.integrations import checks
from weightsync.integrations.verl import backend, check, plugin
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
    assert all("RolloutRank_0:" in replica.name for replica in run.rounds()[-1].replicas), "Ray's name of the actor"
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


def test_the_examples_of_the_guide_are_valid_configurations_of_verl_with_each_option_that_they_show() -> None:
    page = (ROOT / "docs/integrations/verl.md").read_text()
    colocated, separated = re.findall(r"^python -m verl\.trainer\.main_ppo \\\n((?:    .*\n)+)", page, re.MULTILINE)
    (by_options,) = re.findall(r"^'(\+.*engine_kwargs\.weightsync=\{\})'$", page, re.MULTILINE)
    options = [[], *map(shlex.split, re.findall(r"`('?\+[\w.]+engine_kwargs\S+=\S+)`", page))]
    line = ["actor_rollout_ref.rollout.checkpoint_engine.backend=naive", by_options]
    modes: list[tuple[str, str]] = []
    made: list[Any] = []
    for command, added in [(colocated, []), (colocated, line), *((separated, option) for option in options)]:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=[*shlex.split(command.replace("\\\n", " ")), *added])
        validate_config(config, need_reference_policy(config), need_critic(config))
        assert not need_critic(config), "a critic would be another model to name"
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).checkpoint_engine
        assert plugin.is_chosen(engine)
        modes.append((config.trainer.v1.trainer_mode, engine.backend))
        made.append(CheckpointEngineRegistry.new("weightsync", bucket_size=1 << 20, **engine.engine_kwargs.get("weightsync", {})))
    assert modes[:3] == [("sync", "weightsync"), ("sync", "naive"), ("separate_async", "weightsync")]
    assert {type(one) for one in made} == {backend.StreamCheckpointEngine}
    shown = [str(one._options.dtype) for one in made if one._options.dtype] + ["shards" for one in made if one._options.shards]
    assert shown == ["bfloat16", str({"*.mlp.gate.weight": "float32", "*": "bfloat16"}), "shards"]


def test_verls_own_adapter_is_made_where_weightsync_was_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rollouts._ROLLOUT_REGISTRY["vllm", "async"] == "weightsync.integrations.verl.plugin.vllm_adapter"
    assert plugin._verls_adapter == "verl.workers.rollout.vllm_rollout.ServerAdapter"
    made = SimpleNamespace(ServerAdapter=lambda **given: given["device_mesh"])
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.vllm_rollout", made)
    config = SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="naive", engine_kwargs={}))
    assert rollouts.get_rollout_class("vllm")(config=config, model_config=None, device_mesh="its own") == "its own"


def test_the_check_of_an_installation_finds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WEIGHTSYNC_", "VERL_"))]:
        monkeypatch.delenv(name)
    program = (
        "import sys, verl; from weightsync.integrations.__main__ import main; "
        "assert 'weightsync.integrations.verl.backend' not in sys.modules, 'the plugin is thin'; sys.exit(main(['verl']))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line[9:22].strip(): line.split()[0] for line in done.stdout.splitlines() if line[0] != " "}
    fine = dict.fromkeys(["weightsync", "ray", "verl", "entry point", "backend", "coordinator"], "ok")
    assert found == {**fine, "token": "limited", "vLLM": "limited"}, "vLLM is not installed here"


def test_the_check_says_whether_vllms_workers_can_read_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check._workers().value == "not installed in this environment"
    monkeypatch.setattr(checks, "release_of", lambda _: "0.32.0")
    monkeypatch.setattr(checks, "check_interface", lambda package, purpose: None)
    assert (check._workers().status, check._workers().value[:7]) == ("ok", "0.32.0:")
    monkeypatch.setattr(checks, "release_of", lambda _: "0.24.0")
    assert "tested: vLLM 0.25" in check._workers().value
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert (check._workers().status, "VLLM_PLUGINS=another" in check._workers().value) == ("limited", True)
    monkeypatch.setitem(rollouts._ROLLOUT_REGISTRY, ("vllm", "async"), "verl.workers.rollout.vllm_rollout.ServerAdapter")
    assert "this verl makes its own adapter" in check._workers().value


def test_the_check_says_that_a_verl_without_plugins_and_modules_cannot_find_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl 0.7: it has checkpoint engines, but no way to name another one."""

    @dataclass
    class Config:
        backend: str = "naive"

    monkeypatch.delitem(CheckpointEngineRegistry._registry, "weightsync")
    assert check._registered().status == "limited"
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in check._registered().value
    monkeypatch.setattr(verl.workers.config, "CheckpointEngineConfig", Config)
    found = check._registered()
    assert (found.status, "custom_backend_module" in found.value) == ("missing", True)


def test_a_second_run_on_the_coordinator_of_another_is_told_to_take_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MembershipError("trainer/0 is already connected. Revoke it.")

    rank = backend.StreamCheckpointEngine(bucket_size=1 << 20, is_master=True)
    monkeypatch.setattr(rank._sender, "join", refuse)
    with pytest.raises(MembershipError, match="do not end it: each run needs its own coordinator"):
        rank.init_process_group(0, 1, {"coordinator": "http://127.0.0.1:1", "seconds": 1.0})


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
    monkeypatch.setattr(releases, "version", lambda _: "1.3.0")
    releases.warn_if_untested.cache_clear()
    with caplog.at_level(logging.WARNING, "weightsync"):
        for _ in range(2):
            actors, rollouts = backend.StreamCheckpointEngine.build_topology(1, 1, [ACTOR, about()])
    assert {len(values) for values in [*actors.values(), *rollouts.values()]} == {1}
    assert [record.message for record in caplog.records if "1.3.0" in record.message] == [caplog.records[0].message]


def test_an_interface_that_asks_for_more_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = type("Newer", (backend.StreamCheckpointEngine,), {})
    monkeypatch.setattr(newer, "__abstractmethods__", frozenset({"rebalance"}))
    with pytest.raises(ConfigurationError, match="calls rebalance, which weightsync does not have"):
        newer(bucket_size=1)


@pytest.mark.parametrize("options", [{"dtyp": "bfloat16"}, {"dtype": "int8"}, {"timeout": 0}, {"transports": "tcp"}])
def test_a_wrong_option_is_an_error_that_names_the_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"engine_kwargs\.weightsync"):
        CheckpointEngineRegistry.new("weightsync", bucket_size=1, **options)
