"""AReaL's own FSDP2 engine on two ranks publishes its shards to engines in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

pytest.importorskip("areal", reason="AReaL is not installed here: make areal-test")

from tests.integration.policy_run import FailingAdapter, PolicyRun
from tests.integration.server.service_support import free_port

from weightsync.integrations.__main__ import main as check_installation

pytestmark = [pytest.mark.areal, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[PolicyRun]:
    with ExitStack() as owned:
        yield PolicyRun(owned, tmp_path, "areal/areal_ranks.py", tied=False)


def test_servers_hold_areals_model_under_its_own_version_also_when_it_starts_again_from_an_earlier_step(run: PolicyRun) -> None:
    one, other = run.serve("vllm-0"), run.serve("vllm-1")
    before = {name: tensor.clone() for name, tensor in one[1].state_dict().items()}
    for versions in ([4, 5, 6], [5]):
        reports = run.train(2, *versions)
        expected = [[name, versions[-1], "installed"] for name in ("vllm-0", "vllm-1")]
        assert [report["replicas"] for report in reports] == [expected, expected]
        assert {report["rollout"] for report in reports} == {versions[-1]}
        for engine, model in (one, other):
            assert str(engine.serving) == reports[0]["label"]
            run.assert_published(model)
    assert not any(torch.equal(before[name], tensor) for name, tensor in one[1].state_dict().items())


def test_a_server_that_fails_raises_on_every_rank_and_the_others_serve_the_version(run: PolicyRun) -> None:
    good, model = run.serve("vllm-0")
    bad, _ = run.serve("vllm-1", FailingAdapter)
    for report in run.train(2, 1):
        assert report["error"] == "RoundFailed"
        assert "reached 1 of 2 servers (vllm-1" in report["message"]
        assert "this engine cannot take them" in report["message"]
    assert good.serving is not None
    assert good.serving.number == 1
    run.assert_published(model)
    assert bad.serving is None


def test_updates_that_are_not_of_a_whole_model_over_the_network_are_refused(run: PolicyRun) -> None:
    for report in run.train(1):
        assert report["disk"]["error"] == report["error"] == "ConfigurationError"
        assert "actor.weight_update_mode=xccl" in report["disk"]["message"]
        assert "actor.use_lora=false" in report["message"]


def test_the_benchmark_of_doors_runs(run: PolicyRun) -> None:
    engine, _ = run.serve("vllm-0")
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    child = run.run(
        "-m", "benchmarks.gpu_doors", "areal", "--train", "--rounds", "1", "--no-own", "--directory", run.folder,
        HF_HUB_OFFLINE="1", **rank,
    )  # fmt: skip
    assert child.exit_code(200) == 0, child.printed[-4000:]
    rows = [json.loads(line) for line in child.printed.splitlines() if line.startswith("{")]
    assert [row["way"] for row in rows] == ["AReaL through weightsync", "weightsync.Trainer"]
    for row in rows:
        assert (row["verified"], row["updates"]) == ("installed", 1)
        assert 0 < row["paused_ms"] <= row["median_ms"]
    assert engine.serving is not None


def test_enable_replaces_the_actor_that_areals_trainer_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import areal.engine

    from weightsync.integrations.areal import enable
    from weightsync.integrations.areal.actor import PublishingFSDPActor

    monkeypatch.setattr(areal.engine, "FSDPPPOActor", areal.engine.FSDPPPOActor)
    enable()
    enable()
    assert areal.engine.FSDPPPOActor is PublishingFSDPActor
    path = f"{PublishingFSDPActor.__module__}.{PublishingFSDPActor.__name__}"  # what AReaL's controllers tell their workers
    assert path == "weightsync.integrations.areal.actor.PublishingFSDPActor"


def test_the_check_of_an_installation_finds_the_engine(
    run: PolicyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", run.coordinator.url)
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", str(run.coordinator.token))
    assert check_installation(["areal"]) == 0
    printed = capsys.readouterr().out
    assert "FSDPEngine has what weightsync replaces and calls" in printed
    assert run.coordinator.url in printed
