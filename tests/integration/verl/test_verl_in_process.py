"""weightsync's parts of verl in one process, without Ray: what all ranks decide together, and what goes wrong between two updates.

An FSDP2 model of one rank is the actor's, and ``verl_vllm.DirectServer`` the server with its worker.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here")

import msgspec
import torch
import torch.distributed as dist
from benchmarks import gpu_verl
from tests.integration.verl.verl_cluster import make_model
from tests.integration.verl.verl_vllm import DirectServer, part_of_vllm_rollout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from weightsync.config import ClientSettings
from weightsync.engines.vllm import in_call
from weightsync.errors import ConfigurationError, RoundFailed
from weightsync.integrations.verl import vllm_servers
from weightsync.integrations.verl.backend import DirectUpdate, StreamCheckpointEngine
from weightsync.server.client import Client

SECONDS = 12.0
OPTIONS: dict[str, Any] = {"timeout": SECONDS}
BENCHMARK: Any = gpu_verl  # untyped

pytestmark = [
    pytest.mark.verl,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl's, Ray's and those of what they import
]


class Answer:
    """What Ray gives of a call."""

    def __init__(self, answer: Future[Any]) -> None:
        self._answer = answer

    def future(self) -> Future[Any]:
        return self._answer

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._answer).__await__()


class Handle:
    """What Ray gives of an actor, here of an object on another thread's event loop."""

    def __init__(self, served: DirectServer) -> None:
        self.served, self.loop = served, asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        async def apply(function: Any) -> Any:
            return function(self.served)

        method = apply if name == "__ray_call__" else getattr(self.served, name)

        def remote(*args: Any, **kwargs: Any) -> Any:
            future: Future[Any] = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self.loop)
            return Answer(future)

        return SimpleNamespace(remote=remote)


class Both:
    """An actor rank and a rollout rank, as verl makes them and tells them of one update after the other."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (1,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.about = SimpleNamespace(local_path=path, hf_config=AutoConfig.from_pretrained(path), lora_rank=0, lora={})
        self.actor = SimpleNamespace(engine=SimpleNamespace(module=self.model, model_config=self.about, get_per_tensor_param=print))
        self.served = DirectServer("", path)
        self.handle = Handle(self.served)
        config = SimpleNamespace(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, data_parallel_size=1, quantization=None,
            load_format="dummy",
        )  # fmt: skip
        self.adapter = SimpleNamespace(
            config=config, model_config=self.about, replica_rank=0, node_rank=0, _has_server=True, server_handle=self.handle,
            _ensure_server_handle=lambda: True, _get_server_name_prefix=lambda: "vllm_",
        )  # fmt: skip
        self.replica = vllm_servers.ServedReplica(self.adapter)
        self.init_model()

    def init_model(self) -> None:
        """As verl's worker does it: the checkpoint engine is made in a method of the worker that has the training engine."""
        self.sends = StreamCheckpointEngine(1 << 20, is_master=True, **OPTIONS)
        self.receives = StreamCheckpointEngine(1 << 20, **OPTIONS)
        colocated = part_of_adapter()._Colocated
        engine = SimpleNamespace(engine_kwargs={"weightsync": OPTIONS})
        self.colocated = colocated(self.replica, SimpleNamespace(checkpoint_engine=engine))

    def change(self, seed: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.full_like(parameter, seed / 64))

    def holds(self, seed: int) -> bool:
        return {float(value) for parameter in self.served.model.parameters() for value in parameter.detach().flatten()} == {
            seed / 64
        }

    def begin(self) -> Any:
        """verl's manager until all ranks have joined; what the rollout rank then gets."""
        actors, rollouts = StreamCheckpointEngine.build_topology(1, 1, [self.sends.prepare(), self.receives.prepare()])
        with ThreadPoolExecutor(2) as threads:
            joining = [
                threads.submit(rank.init_process_group, **{name: values[0] for name, values in arguments.items()})
                for rank, arguments in ((self.sends, actors), (self.receives, rollouts))
            ]
            for joined in joining:
                joined.result(SECONDS)
        return self.receives.receive_weights()

    def publish(self, weights: Any = ()) -> dict[str, float]:
        return asyncio.run(self.sends.send_weights(iter(weights)))

    def update(self, seed: int) -> dict[str, float]:
        self.change(seed)
        wanted = self.begin()
        assert isinstance(wanted, DirectUpdate)
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(self.replica.update, wanted.number, wanted.seconds)
            metrics = self.publish()
            call.result(SECONDS)
        assert self.holds(seed)
        assert (metrics["checkpoint_engine/installed"], metrics["checkpoint_engine/replicas"]) == (1.0, 1.0)
        return metrics

    def stream(self) -> set[str]:
        """An update of whole tensors; the names that the rollout rank got."""
        weights = self.begin()

        async def take() -> set[str]:
            return {name async for name, _ in weights}

        async def both() -> set[str]:
            whole = ((name, value.to_local()) for name, value in self.model.state_dict().items())
            return (await asyncio.gather(take(), self.sends.send_weights(whole)))[0]

        names = asyncio.run(both())
        self.receives.finalize()
        return names


def part_of_adapter() -> Any:
    part_of_vllm_rollout("vllm_rollout")
    from weightsync.integrations.verl import vllm_adapter

    return vllm_adapter


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder: Path = tmp_path_factory.mktemp("verl")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("check_interface", "install", "direct_shards", "__version__"):  # what DirectServer replaces
            patch.setattr(in_call, name, getattr(in_call, name))
        for name in ("vllm", "vllm.config"):
            patch.setitem(sys.modules, name, sys.modules.get(name, SimpleNamespace()))
        patch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        servers: dict[str, Any] = {}
        context = SimpleNamespace(get_job_id=lambda: "01000000")
        patch.setattr(
            vllm_servers, "ray", SimpleNamespace(get_runtime_context=lambda: context, get_actor=lambda name: servers[name])
        )
        made = Both(str(make_model(folder / "model")))
        servers["vllm_server_0_0"] = made.handle
        yield made
        for engine in (made.sends, made.colocated._actor):
            engine.leave()
        made.replica.calls.leave()
        dist.destroy_process_group()


def test_the_workers_read_the_shards_from_the_first_update_on(both: Both) -> None:
    first = both.update(1)
    assert both.update(2)["checkpoint_engine/version"] == first["checkpoint_engine/version"] + 1
    assert both.served.asked[-4:] == ["weightsync_ready", "weightsync_join", "weightsync_update", "weightsync_update"]


def test_whole_tensors_travel_where_one_rank_cannot_and_shards_again_afterwards(
    both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both.update(3)
    both.replica._is_ready = False
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "another")
        assert both.stream() == set(both.model.state_dict())
        assert both.stream() == set(both.model.state_dict())
    said = [record.message for record in caplog.records if "VLLM_PLUGINS=another leaves weightsync out" in record.message]
    assert len(said) == 1, "once"
    assert both.served.asked[-1] == "weightsync_leave"
    both.update(4)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"quantization": "fp8"}, "the rollout is quantized (fp8)"),
        ({"data_parallel_size": 2}, "data parallelism is untested"),
        ({"tensor_model_parallel_size": 2}, "spans several nodes"),
        ({"disaggregation": SimpleNamespace(enabled=True)}, "prefill and decode"),
        ({"mtp": SimpleNamespace(enable=True, enable_rollout=True)}, "mtp"),
    ],
)
def test_what_vllms_workers_cannot_take_is_named(both: Both, changed: dict[str, Any], words: str) -> None:
    config = SimpleNamespace(**{**vars(both.adapter.config), **changed})
    both.replica._config, kept = config, both.replica._config
    try:
        assert words in str(both.replica.about()["streams"])
    finally:
        both.replica._config = kept


def test_adapters_that_are_not_merged_are_named_and_refused(both: Both) -> None:
    both.about.lora = {"rank": 8}
    try:
        assert "LoRA adapters are not merged" in both.replica.why_not()
        weights = both.begin()
        assert not isinstance(weights, DirectUpdate)
        with pytest.raises(ConfigurationError, match=r"lora\.merge=True"):
            both.publish([("layers.0.q_proj.base_layer.weight", torch.zeros(2))])
    finally:
        both.about.lora = {}
    both.update(5)


def test_a_call_that_waits_for_an_update_that_failed_before_it_began_does_not_take_the_next_ones_place(both: Both) -> None:
    wanted = both.begin()
    with ThreadPoolExecutor(1) as thread:
        stale = thread.submit(both.replica.update, wanted.number, SECONDS)
        both.update(6)  # its own call finds the version there
        stale.result(SECONDS)


def test_a_worker_that_raises_fails_the_update_and_not_the_next_one(both: Both) -> None:
    both.update(7)
    both.served.fault = "raise in weightsync_update"
    both.change(8)
    wanted = both.begin()
    with pytest.raises(RuntimeError, match="does not like it"):
        both.replica.update(wanted.number, wanted.seconds)
    with pytest.raises(RoundFailed, match="verl-01000000-0"):
        both.publish()
    both.served.fault = ""
    assert both.holds(7)
    both.update(9)


def test_a_replica_that_was_left_out_joins_again(both: Both) -> None:
    both.update(10)
    vllm_servers.dismiss(["vllm_server_0_0", "one that is gone"])
    both.sends._servers = {}
    both.update(11)
    assert both.served.asked[-3:] == ["weightsync_leave", "weightsync_join", "weightsync_update"]


def test_whole_tensors_come_from_shards_where_the_user_wants_that(both: Both) -> None:
    """Without a gather: what is published is the actor's own memory, in its own dtype."""
    for engine in (both.sends, both.receives):
        engine._options = msgspec.structs.replace(engine._options, direct=False, shards=True)
    got: dict[str, torch.Tensor] = {}
    never: Any = [("a generator of verl that nothing asks", None)]

    async def take(weights: Any) -> None:
        async for name, tensor in weights:
            got[name] = tensor.clone()

    async def together(weights: Any) -> None:
        await asyncio.gather(take(weights), both.sends.send_weights(iter(never)))

    both.change(20)
    asyncio.run(together(both.begin()))
    both.receives.finalize()
    for engine in (both.sends, both.receives):
        engine._options = msgspec.structs.replace(engine._options, direct=True, shards=False)
    assert got.keys() == both.model.state_dict().keys()
    assert {(tensor.dtype, float(tensor.flatten()[0])) for tensor in got.values()} == {(torch.float32, 20 / 64)}
    both.update(21)


def test_the_benchmark_on_gpus_measures_such_updates_and_the_library_alone(both: Both) -> None:
    def last_round() -> Any:
        with Client(ClientSettings.load(coordinator=both.sends.meeting.coordinator)) as client:
            return msgspec.structs.replace(client.status().rounds[-1], step=step)

    step = 1
    found = BENCHMARK.measure(both.update, lambda seed: None, step, last_round)
    alone = BENCHMARK.library(both.sends, both.actor.engine, both.handle, 2)
    assert both.holds(34), "its second update brings 2 + 32"
    for row in (found[0], *alone):
        assert row["verified"] == ["installed"]
        assert row["call"] > row["round"] > 0
    lines = BENCHMARK.table({"weightsync": found, "library": alone, "nccl": [{"call": 2.0}]}).splitlines()
    assert [line.split()[0] for line in lines] == ["backend", "weightsync", "library", "nccl"]
    assert lines[1].endswith("installed")
    both.sends._number = None  # the library has gone on with the versions
    both.update(35)


@pytest.mark.parametrize(
    ("given", "strategy", "ranks"),
    [("separated moe bf16", "fsdp2", 1), ("colocated dense --gpus 2 --strategy megatron", "megatron", 2)],
)
def test_verl_takes_the_benchmarks_configuration(both: Both, given: str, strategy: str, ranks: int) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = BENCHMARK.configured(BENCHMARK.arguments(given.split()), both.path)
    actor, rollout = omega_conf_to_dataclass(config.actor), omega_conf_to_dataclass(config.rollout)
    assert (actor.strategy, rollout.tensor_model_parallel_size) == (strategy, ranks)
    assert (strategy == "megatron") == hasattr(actor.engine, "vanilla_mbridge")
    if strategy == "megatron":  # it once failed here, on GPUs
        from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

        get_megatron_optimizer_param_scheduler(SimpleNamespace(param_groups=[]), actor.optim)


def test_colocated_ranks_agree_among_themselves(both: Both) -> None:
    for seed in (12, 13):
        both.change(seed)
        assert asyncio.run(both.colocated.update(seed)), "directly"
        assert both.holds(seed)
    both.served.fault = "raise in weightsync_update"
    both.change(14)
    with pytest.raises(RoundFailed) as caught:
        asyncio.run(both.colocated.update(14))
    assert "does not like it" in str(caught.value.__notes__)
    both.served.fault = ""
    both.about.lora_rank = 4
    assert not asyncio.run(both.colocated.update(15)), "verl's own transfer does it"
    both.about.lora_rank = 0
    both.change(16)
    assert asyncio.run(both.colocated.update(16))
    assert both.holds(16)


def run_alone(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.verl.verl_alone", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout, done.stderr


def test_an_adapter_that_is_not_merged_travels_alone_to_a_rollout_that_has_its_base() -> None:
    """verl's own worker with its FSDP engine and PEFT, its rollout worker, and its sender to vLLM."""
    code, out, err = run_alone("auto")
    assert code == 0, err[-4000:]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["down_proj", "q_proj"]}
    expected = ["adapter", True, True, config, True]
    assert json.loads(out.splitlines()[-1]) == [[*expected, step, ["update_weights_from_ipc", "clear"]] for step in (1, 2)]
    assert "actor ranks send the LoRA adapter alone" in err


def test_an_adapter_is_refused_where_the_rollout_has_not_loaded_its_base() -> None:
    code, _, err = run_alone("dummy")
    assert code == 1 and "actor_rollout_ref.rollout.load_format=auto, and the adapter is sent alone" in err


def test_verls_own_workers_update_through_the_adapter_that_they_make_colocated_and_separated() -> None:
    code, out, err = run_alone()
    assert code == 0, err[-4000:]
    found = json.loads(out.splitlines()[-1])
    update = ["weightsync_update", "clear"]
    joins = ["weightsync_ready", "weightsync_join", *update]
    whole = ["weightsync_leave", "update_weights_from_ipc", "clear"]
    assert found["colocated"] == [
        "VllmAdapter",
        [True, 1, False, ["wake weights", *joins, "wake kv_cache"]],
        [True, 2, False, ["wake weights", *update, "wake kv_cache"]],
        [True, 3, True, ["wake weights", *whole, "wake kv_cache"]],
    ]
    assert found["separated"] == [
        [True, 1, False, joins, "direct", 1.0], [True, 2, False, update, "direct", 1.0],
        [True, 3, True, ["weightsync_leave", *whole], "stream", 0.0],
    ]  # fmt: skip
    assert err.count("VLLM_PLUGINS=another leaves weightsync out") == 2, "one line for each way"
