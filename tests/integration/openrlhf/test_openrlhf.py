"""OpenRLHF's own policy trainer with DeepSpeed on two ranks publishes to engines."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("openrlhf", reason="OpenRLHF is not installed here: make openrlhf-test")

from safetensors.torch import load_file
from tests.integration.openrlhf import flash_attn_standin
from tests.integration.policy_run import FailingAdapter, PolicyRun

import weightsync
from weightsync import releases
from weightsync.errors import ConfigurationError
from weightsync.integrations.__main__ import main as check_installation

pytestmark = [pytest.mark.openrlhf, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

SECONDS = 15.0
"""An update's timeout where something goes wrong in it."""
GRACE = 8.0
"""What an error may be late on a machine that is busy."""

ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the home folder
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_prestart_worker_first_driver": "0",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[PolicyRun]:
    with ExitStack() as owned:
        yield PolicyRun(owned, tmp_path, "openrlhf/openrlhf_ranks.py", tied=True)


class Held:
    """Ranks of a run whose second update stops on rank 1: of ZeRO-3 in the middle of the stream, else before it publishes."""

    def __init__(self, run: PolicyRun, owned: ExitStack, zero: int, engines: int = 1) -> None:
        listener = owned.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(120)
        port = listener.getsockname()[1]
        self.processes = run.start(engines, zero, 2, 0, 1, port, WEIGHTSYNC_PUBLISH_TIMEOUT=str(SECONDS))
        self._run = run
        self._connection = owned.enter_context(listener.accept()[0])

    def go_on(self) -> None:
        self._connection.close()

    def report(self, rank: int) -> dict[str, Any]:
        return self._run.report(self.processes, rank, SECONDS + 2 * GRACE)


def assert_not_served(engine: weightsync.Engine) -> None:
    """The second version is not; after a stream that was interrupted, none is."""
    assert engine.serving is None or engine.serving.number == 0


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("zero", [2, 3])
def test_engines_hold_the_policys_model_after_each_update(run: PolicyRun, zero: int) -> None:
    models = [run.serve("vllm-0")[1], run.serve("vllm-1")[1]]
    before = {name: tensor.clone() for name, tensor in models[0].named_parameters()}
    reports = run.train(2, zero, 2)
    for report in reports:
        assert [(name, verified) for name, _, verified in report["replicas"]] == [("vllm-0", "installed"), ("vllm-1", "installed")]
    for model in models:
        run.assert_published(model)
    assert not any(torch.equal(before[name], tensor) for name, tensor in models[0].named_parameters())


def test_openrlhfs_rollout_actor_with_a_real_vllm_holds_the_policys_model(run: PolicyRun) -> None:
    rollout = run.run("tests/integration/openrlhf/openrlhf_rollout.py", run.folder, **ON_A_CPU)
    for report in run.train(1, 2, 2):
        [(_, number, verified)] = report["replicas"]
        assert (number, verified) == (1, "received")
    rollout.write()
    rollout.end(90)
    published, held = load_file(run.folder / "published.safetensors"), load_file(run.folder / "held.safetensors")
    biases = [published[f"model.layers.1.self_attn.{which}_proj.bias"] for which in "qkv"]
    assert torch.equal(held.pop("model.layers.1.self_attn.qkv_proj.bias"), torch.cat(biases))
    assert [name for name, tensor in held.items() if not torch.equal(tensor, published[name])] == []


def test_the_check_of_an_installation_finds_what_is_replaced(
    run: PolicyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flash_attn_standin.install()
    monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", run.coordinator.url)
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", str(run.coordinator.token))
    assert check_installation(["openrlhf"]) == 0
    assert "its policy actors have what weightsync replaces" in capsys.readouterr().out


def test_enable_replaces_the_actors_that_openrlhfs_program_starts_and_names_a_release_that_was_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flash_attn_standin.install()
    from openrlhf.trainer.ray import ppo_actor, vllm_engine

    from weightsync.integrations.openrlhf import PROGRAM, actor_class, enable
    from weightsync.integrations.openrlhf.policy import PublishingPolicyActor
    from weightsync.integrations.openrlhf.rollout import JoiningRolloutActor

    policy, rollout = ppo_actor.PolicyModelActor, vllm_engine.RolloutRayActor
    monkeypatch.setattr(ppo_actor, "PolicyModelActor", policy)
    monkeypatch.setattr(vllm_engine, "RolloutRayActor", rollout)
    monkeypatch.setitem(sys.modules, PROGRAM, ModuleType(PROGRAM))
    with pytest.raises(ConfigurationError, match="imported already"):
        enable()
    monkeypatch.delitem(sys.modules, PROGRAM)
    releases.warn_if_untested.cache_clear()
    monkeypatch.setattr(releases, "version", lambda _: "9.99.0")
    with caplog.at_level(logging.WARNING):
        enable()
        enable()
    releases.warn_if_untested.cache_clear()
    assert ["with OpenRLHF" in record.getMessage() for record in caplog.records if record.name == releases.__name__] == [True]
    assert actor_class(ppo_actor.PolicyModelActor) is PublishingPolicyActor
    assert issubclass(PublishingPolicyActor, actor_class(policy))
    assert actor_class(vllm_engine.RolloutRayActor) is JoiningRolloutActor
    assert issubclass(JoiningRolloutActor, actor_class(rollout))


def test_an_engine_that_fails_raises_on_every_rank_and_the_others_serve_the_version(run: PolicyRun) -> None:
    _, good = run.serve("vllm-0")
    run.serve("vllm-1", FailingAdapter)
    for report in run.train(2, 2, 1):
        assert report["error"] == "RoundFailed"
        assert "reached 1 of 2 engines (vllm-1" in report["message"]
    run.assert_published(good)


def test_adapters_are_refused_on_every_rank(run: PolicyRun) -> None:
    for report in run.train(1, 2, 1, 8):
        assert (report["error"], "LoRA" in report["message"]) == ("ConfigurationError", True)


@pytest.mark.parametrize(
    ("zero", "error", "message"),
    [
        (2, "DeadlineExceeded", "trainer rank 1 (not connected) did not call publish()"),
        (3, "RuntimeError", "gloo/transport/tcp/pair.cc"),  # closed or reset, as the system tells it
    ],
)
def test_a_rank_that_dies_in_an_update_is_an_error_on_the_others_and_no_engine_serves_the_version(
    run: PolicyRun, owned: ExitStack, zero: int, error: str, message: str
) -> None:
    engine, _ = run.serve("vllm-0")
    held = Held(run, owned, zero)
    held.processes[1].kill()
    report = held.report(0)
    assert (report["error"], message in report["message"]) == (error, True), report
    assert report["seconds"] < SECONDS + GRACE
    assert_not_served(engine)


def test_a_rank_that_stops_in_an_update_is_an_error_on_the_others_within_the_deadline(run: PolicyRun, owned: ExitStack) -> None:
    engine, _ = run.serve("vllm-0")
    held = Held(run, owned, 3)
    held.processes[1].send_signal(signal.SIGSTOP)
    report = held.report(0)
    assert report["error"] == "DeadlineExceeded"
    assert report["seconds"] < SECONDS + GRACE, report
    assert_not_served(engine)


def test_a_coordinator_that_stops_in_an_update_is_an_error_on_every_rank(run: PolicyRun, owned: ExitStack) -> None:
    engine, _ = run.serve("vllm-0")
    held = Held(run, owned, 3)
    run.coordinator.stop()
    held.go_on()
    for rank in range(2):
        report = held.report(rank)
        assert (report["error"], report["seconds"] < SECONDS) == ("Aborted", True), report
    assert_not_served(engine)


def test_an_engine_that_dies_while_weights_flow_is_an_error_on_every_rank_and_the_others_serve_the_version(
    run: PolicyRun, owned: ExitStack
) -> None:
    engine, model = run.serve("vllm-0")
    other = run.serve_elsewhere("vllm-1")
    held = Held(run, owned, 3, engines=2)
    other.kill()
    held.go_on()
    for rank in range(2):
        report = held.report(rank)
        assert report["error"] == "RoundFailed", report
        assert "reached 1 of 2 engines" in report["message"]
        assert report["seconds"] < SECONDS + GRACE
    assert engine.serving is not None
    assert engine.serving.number == 1
    run.assert_published(model)
