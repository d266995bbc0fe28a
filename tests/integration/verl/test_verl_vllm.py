"""verl's own vLLM adapter, sender and receiver behind weightsync: updates that fail, and tensors larger than a bucket."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here")

import ray
import torch
from ray.exceptions import RayTaskError
from tests.integration.server.service_support import free_port
from tests.integration.verl.verl_cluster import OPTION, Run, cluster
from tests.integration.verl.verl_platform import DeviceModule
from tests.integration.verl.verl_vllm import VllmRank, part_of_vllm_rollout, servers

from weightsync.errors import AuthenticationError, RoundFailed
from weightsync.integrations.verl.backend import StreamCheckpointEngine

pytestmark = [
    pytest.mark.verl,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl's, Ray's and those of what they import
]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="v-", ignore_cleanup_errors=True) as folder, cluster(folder):
        yield Run(Path(folder), actors=2, rollouts=2, options=[f"{OPTION}.timeout=30"], rollout=VllmRank)


def held(run: Run) -> list[tuple[dict[str, str], int | None]]:
    return ray.get([server.holds.remote() for server in servers(run.manager.replicas)])  # type: ignore[no-any-return]


@pytest.mark.parametrize("fault", ["raise first", "raise"])
def test_after_an_update_that_failed_the_next_one_passes_through_verls_own_vllm_adapter(run: Run, fault: str) -> None:
    expected = run.change(1)
    run.update(1)
    assert held(run) == [(expected, 1)] * 2

    run.actors.set_fault(fault)
    with pytest.raises(RayTaskError, match="cannot be gathered"):
        run.update(2)
    assert not [result for result in run.rounds() if result.step == 2 and (result.ok or result.updated)], "no replica has it"
    assert [replica.asked[-1] for replica in run.manager.replicas] == ["release"] * 2, "verl has resumed none of them"

    run.actors.set_fault("")
    expected = run.change(3)
    run.update(3)
    assert held(run) == [(expected, 3)] * 2
    assert [replica.asked[-1] for replica in run.manager.replicas] == ["resume"] * 2


def rollout_rank(meeting: dict[str, Any]) -> StreamCheckpointEngine:
    rank = StreamCheckpointEngine(bucket_size=1 << 20)
    rank.init_process_group(rank=0, world_size=1, meeting=meeting)
    return rank


async def received(rank: StreamCheckpointEngine) -> list[str]:
    return [name async for name, _ in rank.receive_weights()]


def test_a_rank_that_received_nothing_is_an_error_before_verl_resumes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "secret")
    meeting = {"coordinator": f"http://127.0.0.1:{free_port()}", "seconds": 1.0, "receivers": []}
    rank = rollout_rank(meeting)
    assert asyncio.run(received(rank)) == []
    with pytest.raises(RoundFailed, match="must not resume it: CoordinatorUnreachable"):
        rank.finalize()
    rank.init_process_group(rank=0, world_size=1, meeting=meeting)  # of the next update
    rank.finalize()


def test_a_rank_that_the_coordinator_refuses_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    master = StreamCheckpointEngine(bucket_size=1 << 20, is_master=True)
    about = master.prepare()
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "another")
    rank = rollout_rank({"coordinator": about["coordinator"], "seconds": 5.0, "receivers": []})
    with pytest.raises(AuthenticationError):
        asyncio.run(received(rank))


def test_a_tensor_larger_than_verls_bucket_reaches_the_engine_in_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, torch's meta device is the accelerator: its tensors have no values, but handles like those of CUDA."""
    transfer: Any = part_of_vllm_rollout("bucketed_weight_transfer")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("meta", 0)
    if device.type == "meta":
        monkeypatch.setattr(transfer, "get_torch_device", DeviceModule)
        monkeypatch.setattr(transfer, "get_device_name", lambda: "meta")
        monkeypatch.setattr(transfer, "get_device_id", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
        monkeypatch.setattr(torch.accelerator, "current_stream", DeviceModule)
    monkeypatch.setenv("WEIGHTSYNC_PUBLISH_TIMEOUT", "60")
    weights = [("small", torch.randn(1024)), ("large", torch.randn(1024, 1024)), ("last", torch.randn(1024))]
    actor, rollout = StreamCheckpointEngine(bucket_size=1 << 20, is_master=True), StreamCheckpointEngine(bucket_size=1 << 20)
    actors, rollouts = StreamCheckpointEngine.build_topology(1, 1, [actor.prepare(), rollout.prepare()])
    for rank, arguments in ((actor, actors), (rollout, rollouts)):
        rank.init_process_group(**{name: values[0] for name, values in arguments.items()})
    loaded: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        index: Any = SimpleNamespace(index=False)  # where a handle of CUDA has a device's number, one of meta has a flag
        worker = transfer.BucketedWeightReceiver(f"ipc://{folder}/socket", index if device.type == "meta" else device)
        threads = [
            threading.Thread(target=worker.receive_weights, args=(lambda tensors, _: loaded.update(tensors),), daemon=True),
            threading.Thread(target=lambda: asyncio.run(actor.send_weights(weights)), daemon=True),
        ]
        for thread in threads:
            thread.start()
        sender = transfer.BucketedWeightSender(f"ipc://{folder}/socket", bucket_size_mb=1)
        asyncio.run(sender.async_send_weights(rollout.receive_weights()))
        for thread in threads:
            thread.join(30)
    assert {name: (tensor.shape, tensor.device.type) for name, tensor in loaded.items()} == {
        name: (tensor.shape, device.type) for name, tensor in weights
    }
    rollout.finalize()
