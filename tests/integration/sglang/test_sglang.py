"""SGLang's own scheduler and Llama on a CPU, joined by the plugin: the contract of adapters, and greedy tokens after updates.

Needs the environment of ``make sglang-test``. What is stubbed: ``sglang_scheduler.py``.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, get_args

import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient
from tests.gpu.test_sglang_direct import check_updates, outcome
from tests.integration.sglang.sglang_scheduler import (
    WITHOUT_SGLANG,
    RunningScheduler,
    install_stubs,
    make_checkpoint,
    random_weights,
    use_environment,
)

from weightsync.config import ServerSettings
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.engines.sglang import refusals
from weightsync.engines.sglang.loop import drop_caches
from weightsync.model import PauseMode
from weightsync.protocol.messages import Delivery
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer
from weightsync_testing.adapter_contract import AdapterContract

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
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput, msgpack_decode, msgpack_encode
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.utils import TypeBasedDispatcher

    from weightsync.engines.sglang import plugin

    taken: list[str] = []
    manager = TokenizerManager.__new__(TokenizerManager)
    manager._result_dispatcher = TypeBasedDispatcher([])
    manager._update_weight_version_if_provided = taken.append
    plugin._take_labels(None, manager)
    label = UpdateWeightVersionReqInput(new_version="run@3", abort_all_requests=False)
    manager._result_dispatcher(msgpack_decode(msgpack_encode(label)))
    assert taken == ["run@3"]


def test_sglangs_server_checks_the_versions_that_requests_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stubs()
    from sglang.srt.managers import tokenizer_manager as theirs
    from sglang.utils import TypeBasedDispatcher

    from weightsync.engines.sglang import plugin

    source = Path(theirs.__file__).parents[1] / "entrypoints" / "http_server.py"  # imports packages that are not installed here
    assert re.search(r"^app = FastAPI\($", source.read_text(), re.MULTILINE)
    app = Starlette(routes=[Route("/generate", lambda request: Response("answered"))])
    monkeypatch.setitem(sys.modules, plugin.SERVER, SimpleNamespace(app=app))
    manager = theirs.TokenizerManager.__new__(theirs.TokenizerManager)
    manager._result_dispatcher = TypeBasedDispatcher([])
    manager.config_value = {"weight_version": "run@3"}.__getitem__
    plugin._take_labels(None, manager)
    with TestClient(app) as client:
        assert client.get("/generate", headers={"X-Weightsync-Min-Version": "run@4"}).status_code == 409
        assert client.get("/generate").headers["X-Weightsync-Version"] == "run@3"
        manager.config_value = {"weight_version": "weightsync:none"}.__getitem__
        assert client.get("/health/weights").status_code == 503
        plugin._take_labels(None, manager)  # a server that has started cannot get it any more, and starts all the same


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
        name = served.running.ask(600)
        served.running.wait_until_running()
        random_weights(served.state, 11)
        after = trainer.publish(timeout=60.0)
        output = served.running.output(name)
    if mode == "abort":
        assert type(output).__name__ == "AbortReq"
        return
    tokens, spans = output
    assert len(tokens) == 600
    expected = [before.version, after.version] if mode == "keep" else [before.version]
    assert [span.version for span in spans] == [str(version) for version in expected]
    if mode == "keep":
        served.reference.load_state_dict(served.state)
        prompt = torch.tensor([[*PROMPT, *tokens[: spans[0].end]]])
        again = served.reference.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert tokens[spans[1].start : spans[1].start + 8] == again.tolist()


def test_another_client_does_not_continue_a_paused_engine_and_a_grammar_does_not_keep_its_cache(served: _Served) -> None:
    running, loop = served.running, served.running.loop
    loop.pause("keep", 10.0)
    running.go_on()
    name = running.ask(8)
    assert running.output(name, 0.3) is None
    assert running.paused
    grammars = running.scheduler.grammar_manager
    loop.call(lambda: grammars.grammar_queue.append("a request that waits for its grammar"), 10.0)
    assert not loop.call(running.scheduler.flush_cache, 10.0)
    assert loop.call(lambda: drop_caches(running.scheduler, None), 10.0)
    assert loop.call(grammars.grammar_queue.pop, 10.0)
    loop.proceed(10.0)
    assert len(running.output(name)[0]) == 8


@pytest.mark.rare
def test_sglangs_own_engine_and_its_processes_on_this_cpu() -> None:
    """What ``test_sglang_direct.py`` holds on a GPU: Transformers' tokens, and the checksum of SGLang's own loading."""
    check_updates(outcome("tests.integration.sglang.sglang_engine"), "direct", "shared_memory")


def test_the_settings_that_are_refused_are_settings_of_sglang(served: _Served) -> None:
    assert refusals._SETTINGS.keys() <= set(served.running.scheduler.server_args.__struct_fields__)
    assert refusals.why_refused(served.running.scheduler) is None
    layer = next(each for each in served.running.scheduler.tp_worker.model_runner.model.modules() if hasattr(each, "quant_method"))
    layer.quant_method.w13_swiglu_interleaved = True  # as experts have it with SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED on a GPU
    assert "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED" in str(refusals.why_refused(served.running.scheduler))
    del layer.quant_method.w13_swiglu_interleaved


def test_the_rows_that_sglang_pads_are_zeros_after_a_load_and_no_tokens(served: _Served) -> None:
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    from weightsync.engines.sglang.joining import padding_of_vocabulary, rows_of_padding

    model = torch.nn.ModuleDict(
        {
            "table": VocabParallelEmbedding(70, 8, org_num_embeddings=66),
            "head": ParallelLMHead(66, 8, bias=True),
            "other": torch.nn.Linear(8, 192),
        }
    )
    padding = padding_of_vocabulary(model)
    assert padding == {
        "table.weight": [slice(66, 128), slice(132, 192)],
        "head.weight": [slice(66, 128), slice(128, 128)],
        "head.bias": [slice(66, 128), slice(128, 128)],
    }
    for name, parts in padding.items():
        parameter: Any = model.get_parameter(name)
        parameter.data.normal_()
        parameter.weight_loader(parameter, torch.ones(66, *parameter.shape[1:]))
        assert all(not parameter[rows].count_nonzero() for rows in parts)
    for ranks in (1, 2, 3, 4):  # every row is a token's or padding
        size = 64 * (ranks if 64 % ranks else 1)
        rows = [
            VocabParallelEmbedding._get_indices(4 * size, 3 * size, 3 * size - 5, 2 * size + 7, rank, ranks)
            for rank in range(ranks)
        ]
        tokens = sum(each.num_elements_padded - sum(part.stop - part.start for part in rows_of_padding(each)) for each in rows)
        assert tokens == 3 * size - 5


def made_adapter(served: _Served) -> tuple[Any, EngineAdapter]:
    """Return a new adapter of the scheduler with scrambled weights, and its shards."""
    from weightsync.engines.hf_checkpoint import checkpoint_of
    from weightsync.engines.sglang.joining import SglangAdapter, install
    from weightsync.engines.traced_shards import DirectShards, find_direct

    scheduler = served.running.scheduler
    runner, loop = scheduler.tp_worker.model_runner, served.running.loop
    config, reload = runner.model_config, partial(install, runner)
    checkpoint = checkpoint_of(config.model_path, None, config.hf_config)
    loop.pause("abort", 10.0)
    manifest, cpu = checkpoint.manifest, torch.device("cpu")
    trial = partial(find_direct, runner.model, manifest, lambda tensors, layers: reload(tensors), cpu, package="sglang")
    direct = loop.call(trial, 60.0)
    assert isinstance(direct, DirectShards)
    for parameter in runner.model.parameters():
        parameter.data.normal_()
    assert loop.call(scheduler.flush_cache, 10.0)
    loop.proceed(10.0)
    return direct, SglangAdapter(
        checkpoint, loop, install=reload, flush=partial(drop_caches, scheduler, None),
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

        scheduler, request = self.served.running.scheduler, ContinueGenerationReqInput(torch_empty_cache=False)
        self.served.running.loop.call(lambda: scheduler.continue_generation(request), 10.0)  # requests of other clients wait
