"""SGLang's own scheduler and Llama on a CPU, joined by the plugin: the contract of adapters, and greedy tokens after updates.

Needs the environment of ``make sglang-test``. What is stubbed: ``sglang_scheduler.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, get_args

import pytest
import torch
from tests.integration.sglang_scheduler import (
    WITHOUT_SGLANG,
    RunningScheduler,
    install_stubs,
    make_checkpoint,
    random_weights,
    use_environment,
)

from weightsync.config import ServerSettings
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.agent import Engine
from weightsync.model import PauseMode
from weightsync.protocol.messages import Delivery
from weightsync.server.server import BackgroundServer
from weightsync.testing.adapter_contract import AdapterContract
from weightsync.trainer.agent import Trainer

pytestmark = [
    pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(WITHOUT_SGLANG, reason="SGLang is not installed here: make sglang-test"),
]  # fmt: skip

PROMPT = (3, 1, 2)


class _Served:
    """The one scheduler of this process, the coordinator that it joined, and a Transformers model to compare with."""

    def __init__(self, directory: str, server: BackgroundServer) -> None:
        from transformers import LlamaForCausalLM

        self.server = server
        self.running = RunningScheduler(directory)
        self.reference: Any = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.state = {name: tensor.clone() for name, tensor in self.reference.state_dict().items()}

    def expected(self, tokens: int) -> list[int]:
        self.reference.load_state_dict(self.state)
        made = self.reference.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return list(made[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Served]:
    install_stubs()
    directory = str(tmp_path_factory.mktemp("checkpoint"))
    make_checkpoint(directory)
    with BackgroundServer(ServerSettings.load({}, port=0)) as server:
        use_environment(WEIGHTSYNC_COORDINATOR=server.url, WEIGHTSYNC_TOKEN=server.token)
        one = _Served(directory, server)
        with one.running:
            yield one


@pytest.fixture
def trainer(served: _Served) -> Iterator[Trainer]:
    with Trainer(served.state, served.server.url, token=served.server.token) as trainer:
        yield trainer


def publish(served: _Served, trainer: Trainer, seed: int) -> Any:
    random_weights(served.state, seed)
    return trainer.publish(timeout=60.0)


def test_the_plugin_joins_and_tokens_equal_transformers_after_each_update(served: _Served, trainer: Trainer) -> None:
    assert served.running.output(served.running.ask(8))[0] == served.expected(8)
    for seed in (1, 2, 3):
        result = publish(served, trainer, seed)
        replica = result.replicas[0]
        assert (replica.name, replica.state, replica.delivery, replica.verified) == ("sglang", "loaded", "direct", "installed")
        tokens, spans = served.running.output(served.running.ask(8))
        assert tokens == served.expected(8)
        assert [span.version for span in spans] == [str(result.version)]
        assert served.running.labels[-2:] == ["weightsync:none", spans[0].version]


def test_a_released_engine_takes_its_memory_again_in_an_update(served: _Served, trainer: Trainer) -> None:
    served.running.release_memory("weights", "kv_cache")
    publish(served, trainer, 4)
    assert not served.running.scheduler.weight_updater.offload_tags
    assert served.running.output(served.running.ask(8))[0] == served.expected(8)


def test_the_tokenizers_process_takes_labels(served: _Served) -> None:
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.utils import TypeBasedDispatcher

    from weightsync.engines.sglang import plugin
    from weightsync.engines.sglang.requests import requests_of_sglang

    taken: list[str] = []
    manager = TokenizerManager.__new__(TokenizerManager)
    manager._result_dispatcher = TypeBasedDispatcher([])
    manager._update_weight_version_if_provided = taken.append
    plugin._take_labels(None, manager)
    manager._result_dispatcher(msgpack_decode(msgpack_encode(requests_of_sglang().label("run@3"))))
    assert taken == ["run@3"]


@pytest.mark.parametrize("mode", get_args(PauseMode))
def test_requests_that_run_when_an_update_comes(served: _Served, mode: PauseMode) -> None:
    """Paused in each mode: kept ones go on with the new weights, and nothing that the old ones computed is left."""
    _, adapter = made_adapter(served)
    random_weights(served.state, 10)
    with (
        BackgroundServer(ServerSettings.load({}, port=0, pause_mode=mode)) as server,
        Trainer(served.state, server.url, token=server.token) as trainer,
        Engine(adapter, "modes", server.url, token=server.token),
    ):
        before = trainer.publish(timeout=60.0)
        name = served.running.ask(200)
        served.running.wait_until_running()
        random_weights(served.state, 11)
        after = trainer.publish(timeout=60.0)
        output = served.running.output(name)
    if mode == "abort":
        assert type(output).__name__ == "AbortReq"
        return
    tokens, spans = output
    assert len(tokens) == 200
    expected = [before.version, after.version] if mode == "keep" else [before.version]
    assert [span.version for span in spans] == [str(version) for version in expected]
    if mode == "keep":
        served.reference.load_state_dict(served.state)
        prompt = torch.tensor([[*PROMPT, *tokens[: spans[0].end]]])
        again = served.reference.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert tokens[spans[1].start : spans[1].start + 8] == again.tolist()


def made_adapter(served: _Served) -> tuple[Any, EngineAdapter]:
    """Return a new adapter of the scheduler with scrambled weights, and its shards."""
    from weightsync.engines.hf_checkpoint import checkpoint_of
    from weightsync.engines.sglang.adapter import SglangAdapter
    from weightsync.engines.sglang.loading import install
    from weightsync.engines.traced_shards import DirectShards, find_direct

    scheduler = served.running.scheduler
    runner, loop = scheduler.tp_worker.model_runner, served.running.loop
    config, reload = runner.model_config, partial(install, runner)
    checkpoint = checkpoint_of(config.model_path, None, config.hf_config)
    loop.pause("abort", 10.0)
    direct = loop.call(lambda: find_direct(runner.model, checkpoint.manifest, reload, torch.device("cpu"), package="sglang"), 60.0)
    assert isinstance(direct, DirectShards)
    for parameter in runner.model.parameters():
        parameter.data.normal_()
    assert loop.call(scheduler.flush_cache, 10.0)
    loop.proceed(10.0)
    return direct, SglangAdapter(
        checkpoint, loop, install=reload, flush=partial(scheduler.flush_cache, empty_cache=False),
        label=lambda version: scheduler.record_weight_version_change(new_version=version), direct=direct,
    )  # fmt: skip


class TestSglangScheduler(AdapterContract):
    deliveries: ClassVar[tuple[Delivery, ...]] = ("direct", "streamed")
    served: ClassVar[_Served]

    @pytest.fixture(autouse=True)
    def one_scheduler(self, served: _Served) -> None:
        type(self).served = served

    def engine(self) -> tuple[Any, EngineAdapter]:
        return made_adapter(self.served)

    def installed(self, engine: Any) -> Mapping[str, torch.Tensor]:
        return {shard.name: shard.tensor.contiguous() for shard in engine.now()}

    def generates(self, engine: Any) -> bool:
        running = self.served.running
        name, end = running.ask(1), time.monotonic() + 20.0
        while time.monotonic() < end:
            output = running.output(name, 0.05)
            if output is not None:
                return isinstance(output, tuple)
            if running.paused and any(getattr(request, "rid", None) == name for request in running.loop._held):
                return False
        raise AssertionError("neither tokens nor a pause")

    def go_on(self, engine: Any) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self.served.running.send(ContinueGenerationReqInput(torch_empty_cache=False))
        end = time.monotonic() + 10.0
        while self.served.running.paused:
            assert time.monotonic() < end
            time.sleep(0.005)
