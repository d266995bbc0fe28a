"""The methods that weightsync adds to vLLM's worker: joining, updating and leaving by a framework's calls, without a vLLM."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import weightsync
from weightsync.config import ServerSettings
from weightsync.engines.vllm import in_call
from weightsync.engines.vllm.in_call import CalledWorker, called
from weightsync.engines.vllm.plugin import add_worker_methods
from weightsync.errors import ConfigurationError, DeadlineExceeded, RoundFailed
from weightsync.server.server import BackgroundServer

SECONDS = 20.0


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


class Worker:
    """As much of vLLM's worker as is used, on a CPU."""

    def __init__(self, directory: Path) -> None:
        self.model: torch.nn.Module = llama()
        self.device = torch.device("cpu")
        self.slept: list[int] = []
        self.parallel_config = SimpleNamespace(
            rank=0, world_size=1, world_size_across_dp=1, data_parallel_index=0, data_parallel_size=1, enable_eplb=False,
            distributed_executor_backend="mp",
        )  # fmt: skip
        self.model_config = SimpleNamespace(model=str(directory), revision=None, hf_config=self.model.config, quantization=None)
        self.vllm_config = SimpleNamespace(model_config=self.model_config, lora_config=None)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def sleep(self, level: int = 1) -> None:
        self.slept.append(level)


@pytest.fixture
def server(no_leaks: None, tmp_path: Path) -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as server:
        (tmp_path / "token").write_text(server.token + "\n")
        yield server


@pytest.fixture
def trainer(server: BackgroundServer) -> Iterator[weightsync.Trainer]:
    with weightsync.Trainer(llama(), server.url, token=server.token) as trainer:
        yield trainer


@pytest.fixture
def worker(trainer: weightsync.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    save_file(llama().state_dict(), tmp_path / "model.safetensors")
    worker = Worker(tmp_path)

    def install(model: torch.nn.Module, config: object, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if (model, config) == (worker.model, worker.model_config):
            model.load_state_dict(dict(tensors))

    config: Any = ModuleType("vllm.config")
    config.set_current_vllm_config = lambda vllm_config: contextlib.nullcontext()
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setattr(in_call, "install", install)
    monkeypatch.setattr(in_call, "check_interface", lambda package, purpose: None)
    yield worker
    called(worker).leave()


def join(worker: Worker, server: BackgroundServer, name: str = "r") -> CalledWorker:
    own = called(worker)
    own.join(server.url, name, token_file=f"{worker.model_config.model}/token")
    return own


def publish(own: CalledWorker, trainer: weightsync.Trainer, number: int) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(own.update, number, timeout=SECONDS)
        result = trainer.publish(number, timeout=SECONDS)
        about = call.result(SECONDS)
    assert about["digest"] == result.version.digest
    return about


def test_an_update_says_what_was_installed(worker: Worker, server: BackgroundServer, trainer: weightsync.Trainer) -> None:
    own = join(worker, server)
    trainer.wait_for_replicas(1, timeout=SECONDS, names=["r"])
    about = publish(own, trainer, 3)
    assert (about["replica"], about["rank"], about["number"], about["epoch"], about["verified"]) == ("r", 0, 3, 1, "received")
    assert about["version"].endswith("@3")
    assert about["nbytes"] == sum(parameter.nbytes for parameter in worker.model.parameters())
    assert about["seconds"] > 0
    assert about["waited"] >= 0


def test_another_release_of_the_caller_is_an_error_because_frameworks_drop_answers(worker: Worker) -> None:
    assert called(worker).ready(release=weightsync.__version__)["weightsync"] == weightsync.__version__
    with pytest.raises(ConfigurationError, match=r"the caller has 0\.0\.1"):
        called(worker).ready(release="0.0.1")


def test_a_version_that_is_there_is_not_waited_for_unless_the_weights_were_discarded(
    worker: Worker, server: BackgroundServer, trainer: weightsync.Trainer
) -> None:
    own = join(worker, server)
    trainer.wait_for_replicas(1, timeout=SECONDS)
    publish(own, trainer, 3)
    held: list[tuple[int, int | None]] = [(3, None), (3, 1), (2, 1)]
    for number, epoch in held:
        again = own.update(number, epoch, SECONDS)
        assert (again["number"], again["nbytes"], again["waited"]) == (3, 0, 0.0)
    missing: list[tuple[int | None, int | None]] = [(4, None), (2, None), (1, 2), (None, None)]  # a new epoch uses numbers again
    for wanted, of_epoch in missing:
        with pytest.raises(DeadlineExceeded, match="the engine keeps its weights"):
            own.update(wanted, of_epoch, 0.05)
    worker.sleep(1)
    assert own.update(3)["nbytes"] == 0
    worker.sleep(level=2)
    with pytest.raises(DeadlineExceeded, match="no update to version 3 came"):
        own.update(3, timeout=0.05)
    assert worker.slept == [1, 2]
    publish(own, trainer, 5)
    assert own.update(5)["nbytes"] == 0


def test_a_failed_load_fails_the_call_and_the_version_is_not_there(
    worker: Worker, server: BackgroundServer, trainer: weightsync.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = join(worker, server)
    trainer.wait_for_replicas(1, timeout=SECONDS)
    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as thread:
        patched.setattr(in_call, "install", lambda *arguments: 1 / 0)
        call = thread.submit(own.update, 3, timeout=SECONDS)
        with pytest.raises(RoundFailed, match="division by zero"):
            trainer.publish(3, timeout=SECONDS)
        assert "division by zero" in str(call.exception(SECONDS))
    again = own.update(3, timeout=SECONDS)  # from the trainer's region
    assert (again["number"], again["nbytes"] > 0) == (3, True)


def test_joining_again_does_nothing_and_under_another_name_leaves(
    worker: Worker, server: BackgroundServer, trainer: weightsync.Trainer
) -> None:
    own = join(worker, server)
    engine = own._engine
    join(worker, server)
    assert own._engine is engine
    join(worker, server, "other")
    assert trainer.wait_for_replicas(1, timeout=SECONDS, names=["other"]) == ("other",)
    own.leave()
    own.leave()
    with pytest.raises(ConfigurationError, match="call weightsync_join first"):
        own.update(1)


def test_what_cannot_be_joined_is_refused(worker: Worker, server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    own, folder = called(worker), worker.model_config.model
    with pytest.raises(ConfigurationError, match="needs a name"):
        own.join(server.url)
    with pytest.raises(ConfigurationError, match=r"token_file '.*none' cannot be read"):
        own.join(server.url, "r", token_file=f"{folder}/none")
    with pytest.raises(ConfigurationError, match="cannot be written directly: this worker's weights are on cpu"):
        own.join(server.url, "r", token_file=f"{folder}/token", delivery="direct")
    monkeypatch.setattr(worker, "weight_transfer_engine", SimpleNamespace(joined=True), raising=False)
    with pytest.raises(ConfigurationError, match="use one way only"):
        own.join(server.url, "r", token_file=f"{folder}/token")


def test_balanced_experts_are_refused(worker: Worker) -> None:
    worker.parallel_config.enable_eplb = True
    with pytest.raises(ConfigurationError, match="--enable-eplb"):
        called(worker).ready()


def test_ready_says_how_weights_come(worker: Worker) -> None:
    about = called(worker).ready()
    assert (about["rank"], about["ranks"], about["delivery"]) == (0, 1, "streamed")
    assert "on cpu" in about["reason"]
    assert about["weightsync"] == weightsync.__version__


def test_the_plugin_adds_methods_to_the_worker(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    add_worker_methods()  # without this module it does nothing
    module: Any = ModuleType("vllm.v1.worker.worker_base")
    module.WorkerBase = type("WorkerBase", (Worker,), {})
    for name in ("vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    add_worker_methods()
    add_worker_methods()
    other = module.WorkerBase(Path(worker.model_config.model))
    assert other.weightsync_ready(delivery="streamed")["delivery"] == "streamed"
    other.weightsync_leave()
    with pytest.raises(ConfigurationError, match="weightsync_join first"):
        other.weightsync_update(1)
    with pytest.raises(ConfigurationError, match="needs a name"):
        other.weightsync_join("http://head:7400")
