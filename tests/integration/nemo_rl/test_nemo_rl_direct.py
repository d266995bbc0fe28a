"""Shards of policy workers into vLLM's workers, without NeMo-RL: what all ranks decide together, and what goes wrong afterwards.

An FSDP2 model of one rank is the policy's, and a :class:`~tests.integration.called_module.Model` vLLM's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.integration.called_module import MethodsOfPlugin, Model, make_model, without_vllm, worker_of
from tests.integration.nemo_rl.test_nemo_rl import make
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from weightsync.engines.vllm import in_call
from weightsync.errors import Aborted, ConfigurationError, RoundFailed
from weightsync.integrations import stream_ranks
from weightsync.integrations.nemo_rl.engine import RefitEngine, _replica_of
from weightsync.trainer.trainer import Trainer

SECONDS = 12.0

pytestmark = pytest.mark.usefixtures("runtime")


class PolicyWorker:
    """What is used of NeMo-RL's DTensor policy worker."""

    def __init__(self, path: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (1,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        vllm = {"precision": "bfloat16", "kv_cache_dtype": "auto"}
        self.cfg: dict[str, Any] = {"model_name": path, "generation": {"vllm_cfg": vllm}}
        self.places: list[str] = []
        self.walked = 0

    def init_checkpoint_engine(self, **options: Any) -> None:
        self.checkpoint_engine = make(timeout=SECONDS, **options)

    def _prepare_checkpoint_engine_weight_send(self) -> None:
        self.places.append("cuda")

    def _finalize_checkpoint_engine_weight_send(self) -> None:
        self.places.append("cpu")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.full_tensor().to(torch.bfloat16)
        self.walked += 1

    def send_weights_via_checkpoint_engine(self) -> None:
        asyncio.run(self.checkpoint_engine.send_weights(self.weights()))

    def change(self, seed: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.full_like(parameter, seed / 64))


class VllmWorker(MethodsOfPlugin):
    """What is used of vLLM's worker with NeMo-RL's extension."""

    def __init__(self, path: str) -> None:
        self.model = Model(path)
        self.__dict__.update(worker_of(self.model, path))

    def init_checkpoint_engine(self, **options: Any) -> None:
        self.checkpoint_engine = make(timeout=SECONDS, **options)

    async def _update(self) -> int:
        batches = 0
        async for batch in self.checkpoint_engine.receive_weight_batches():
            self.model.load_weights(batch)
            batches += 1
        return batches

    def update_weights_from_checkpoint_engine(self) -> int:
        return asyncio.run(self._update())


class Both:
    """A policy worker and a vLLM worker, with NeMo-RL's order of calls."""

    def __init__(self, path: str) -> None:
        self.policy, self.worker = PolicyWorker(path), VllmWorker(path)

    def begin(self, **options: Any) -> None:
        sizes: dict[str, Any] = {"train_world_size": 1, "rollout_world_size": 1}
        for side in (self.policy, self.worker):
            side.init_checkpoint_engine(**options)
        own, other = self.policy.checkpoint_engine, self.worker.checkpoint_engine
        sizes["metadata"] = [{**engine.prepare(), "rank": 0} for engine in (own, other)]
        with ThreadPoolExecutor(2) as threads:
            joining = [
                threads.submit(own.init_policy_process_group, worker_rank=0, **sizes),
                threads.submit(other.init_rollout_process_group, rollout_rank=0, **sizes),
            ]
            for joined in joining:
                joined.result(SECONDS * 2)

    def update(self, seed: int) -> int:
        """Return the number of batches that the worker got."""
        self.policy.change(seed)
        with ThreadPoolExecutor(1) as thread:
            receiving = thread.submit(self.worker.update_weights_from_checkpoint_engine)
            self.policy.send_weights_via_checkpoint_engine()
            batches = receiving.result(SECONDS * 2)
        held = {float(value) for parameter in self.worker.model.parameters() for value in parameter.detach().flatten()}
        assert held == {seed / 64}
        return batches

    def end(self) -> None:
        for side in (self.policy, self.worker):
            engine: Any = side.checkpoint_engine
            engine.finalize()
            engine._closing()  # as when the process exits


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("nemo")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("check_interface", "install", "direct_shards"):
            patch.setattr(in_call, name, getattr(in_call, name))
        for name in ("vllm", "vllm.config"):
            patch.setitem(sys.modules, name, sys.modules.get(name, SimpleNamespace()))
        without_vllm()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield Both(make_model(folder / "model"))
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def logged_again() -> None:
    stream_ranks.say_why.cache_clear()
    stream_ranks.say_verified.cache_clear()


def test_vllms_workers_read_the_shards_and_nothing_is_gathered(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    both.begin()
    try:
        assert [both.update(seed) for seed in (1, 2)] == [0, 0]
        assert both.policy.walked == 0
        assert both.policy.places == ["cuda", "cpu"], "a model that is offloaded is loaded where the copy is made"
        seen = [record.message for record in caplog.records if "verified" in record.message]
        assert seen == ["weightsync: vLLM's workers read the weights from the policy ranks, verified in the engines' parameters"]
        both.end()
        both.begin()
        assert both.update(3) == 0
    finally:
        both.end()


@pytest.mark.parametrize(
    ("side", "change", "words"),
    [
        ("policy", {"cfg.generation.vllm_cfg.kv_cache_dtype": "fp8_e4m3"}, "KV scales travel with the weights"),
        ("policy", {"cfg.generation.vllm_cfg.precision": "fp8"}, "vLLM's weights are FP8"),
        ("policy", {"fp8_cfg": {"fp8_param": True}}, "Megatron's weights are FP8"),
        ("policy", {"cfg.quant_cfg": "NVFP4_DEFAULT_CFG"}, "quantizes while it sends"),
        ("policy", {"cfg.generation.quant_cfg": "NVFP4_DEFAULT_CFG"}, "quantizes while it sends"),
        ("policy", {"draft_model": object()}, "draft weights"),
        ("policy", {"lora_enabled": True}, "merges LoRA adapters"),
        ("policy", {"cfg.megatron_cfg": {"peft": {"enabled": True}}}, "merges LoRA adapters"),
        ("policy", {"model.state_dict_adapter": object()}, "state_dict_adapter"),
        ("policy", {"model": torch.nn.Linear(2, 2)}, "neither FSDP2 nor Megatron"),
        ("worker", {"vllm_config.cache_config.cache_dtype": "fp8"}, "KV scales travel with the weights"),
        ("worker", {"model_config.quantization": "fp8"}, "vLLM's weights are quantized (fp8)"),
        ("worker", {"vllm_config.speculative_config": object()}, "draft weights"),
        ("worker", {"parallel_config.data_parallel_size": 2}, "data parallelism"),
        ("worker", {"model_config.dtype": torch.float16}, "does not hold all numbers of vLLM's (torch.float16)"),
        ("worker", {"weightsync_ready": None}, "another worker of this vLLM"),
    ],
)
def test_a_rank_that_cannot_take_part_says_why(both: Both, side: str, change: dict[str, Any], words: str) -> None:
    own = getattr(both, side)
    with pytest.MonkeyPatch.context() as patch:
        for path, value in change.items():
            *folders, name = path.split(".")
            place = own
            for folder in folders:
                place = place[folder] if isinstance(place, dict) else getattr(place, folder)
            if name == "weightsync_ready":
                patch.setattr(place, name, lambda **_: {}, raising=False)
            elif isinstance(place, dict):
                patch.setitem(place, name, value)
            else:
                patch.setattr(place, name, value, raising=False)
        own.init_checkpoint_engine()
        reason = str(own.checkpoint_engine.prepare()["streams"])
        own.checkpoint_engine._closing()
    assert words in reason


def test_where_one_rank_cannot_take_part_all_stream_and_one_line_says_why(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(both.worker.vllm_config, "speculative_config", object())  # type: ignore[attr-defined]
        both.begin()
        walked = both.policy.walked
        assert all(both.update(seed) > 0 for seed in (4, 5))
        assert both.policy.walked == walked + 2
        both.end()
    said = [record.message for record in caplog.records if "because of" in record.message]
    assert len(said) == 1
    assert "policy ranks gather whole tensors" in said[0]
    assert "draft weights travel with the policy's" in said[0]


def test_the_user_can_ask_for_whole_tensors(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    both.begin(direct=False)
    try:
        assert both.update(6) > 0
    finally:
        both.end()
    assert "the option direct is false" in caplog.text


def test_a_vllm_without_the_plugin_is_named(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(MethodsOfPlugin, "weightsync_ready")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    both.worker.init_checkpoint_engine()
    about = both.worker.checkpoint_engine.prepare()
    assert about["streams"] == "VLLM_PLUGINS=another leaves weightsync out"
    both.worker.checkpoint_engine._closing()  # type: ignore[attr-defined]


def test_an_update_that_fails_in_a_worker_fails_on_both_sides_and_the_next_one_works(both: Both) -> None:
    both.begin()
    try:
        both.update(7)
        call: Any = in_call.called(both.worker)._call
        entered = call.require_call
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
            patch.setattr(call, "require_call", lambda: 1 / 0)
            both.policy.change(8)
            receiving = thread.submit(both.worker.update_weights_from_checkpoint_engine)
            with pytest.raises(RoundFailed, match="0 of 1 replicas got the version"):
                both.policy.send_weights_via_checkpoint_engine()
            with pytest.raises(RoundFailed, match="do not resume the engine"):
                receiving.result(SECONDS * 2)
        assert call.require_call == entered
        both.update(9)
    finally:
        both.end()


def test_a_policy_that_leaves_without_an_update_ends_vllms_call_at_once(both: Both) -> None:
    both.begin()
    try:
        with ThreadPoolExecutor(1) as thread:
            own, other = cast(RefitEngine, both.policy.checkpoint_engine), cast(RefitEngine, both.worker.checkpoint_engine)
            reading = thread.submit(other.read_shards, call=7)
            own.finalize(call=7)
            with pytest.raises(Aborted, match=r"nothing more is published to it\. The engine keeps its weights"):
                reading.result(SECONDS / 2)
    finally:
        both.end()
    both.begin()
    try:
        both.update(10)
    finally:
        both.end()


@pytest.mark.parametrize(("keep_copy", "in_place", "stays"), [(True, False, True), (False, False, False), (True, True, False)])
def test_after_an_update_on_shared_gpus_a_policy_rank_stays_joined_only_with_a_copy_that_it_keeps(
    both: Both, keep_copy: bool, in_place: bool, stays: bool
) -> None:
    both.begin(keep_copy=keep_copy)
    try:
        own = cast(RefitEngine, both.policy.checkpoint_engine)
        both.update(11)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "in_place", in_place)
            assert own.end_update(1) == stays
        assert (own._sender._trainer is not None) == stays
        assert not own.end_update(2), "nothing was sent since then"
        assert own._sender._trainer is None
    finally:
        both.end()


def test_a_policy_rank_that_stays_joined_does_not_publish_a_model_that_its_worker_has_replaced(both: Both) -> None:
    both.begin()
    try:
        own = cast(RefitEngine, both.policy.checkpoint_engine)
        both.update(12)
        assert own.end_update(1)
        both.policy.model = PolicyWorker(both.policy.cfg["model_name"]).model
        with pytest.raises(ConfigurationError, match="another model than the one with which it joined"):
            both.policy.send_weights_via_checkpoint_engine()
        assert not own.end_update(2), "it leaves, to join again with the model that it has now"
        both.begin()
        both.update(13)
    finally:
        both.end()


def test_a_send_that_ends_after_its_update_does_not_let_a_rank_stay_that_fails_in_the_next_one(both: Both) -> None:
    both.begin()
    try:
        own = cast(RefitEngine, both.policy.checkpoint_engine)
        both.update(14)  # end_update() came before it was over
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own._sender, "send", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                both.policy.send_weights_via_checkpoint_engine()
        assert not own.end_update(1)
        assert own._sender._trainer is None
    finally:
        both.end()


def test_workers_of_one_vllm_are_ranks_of_one_replica() -> None:
    about = [{"name": name, "rank": rank} for name, rank in (("a", 0), ("b", 1), ("c", 0), ("d", 1))]
    assert [_replica_of(own, about) for own in about] == ["a", "a", "c", "c"]
