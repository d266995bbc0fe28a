"""Holds vLLM's adapter, around a real vLLM on this machine's CPU, to the contract that every engine adapter has.

One vLLM serves all tests, in this process: each test wraps its worker in a new adapter and its engine in new controls. vLLM's CPU
kernels that pack weights are switched off, so that what it computes with can be read. An adapter never drives two engines at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.errors import DeadlineExceeded
from weightsync.protocol.messages import Delivery
from weightsync_testing.adapter_contract import AdapterContract

pytestmark = [
    pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare, pytest.mark.timeout(600), pytest.mark.filterwarnings("default"),
]  # fmt: skip


class _OneVllm:
    """A tiny random Llama in a ``vllm.LLM`` whose worker lives in this process."""

    def __init__(self, directory: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from vllm import LLM, SamplingParams, _custom_ops
        from vllm.config import WeightTransferConfig
        from vllm.triton_utils import dispatcher

        from weightsync.engines.hf_checkpoint import checkpoint_of
        from weightsync.engines.vllm.plugin import register
        from weightsync.tracing.tracer import trace_loader

        config = LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(directory)
        _custom_ops._supports_onednn = False
        _hide_llvmlite(dispatcher)
        register()
        self.llm = LLM(
            model=directory, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=32, max_num_seqs=2,
            weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        )  # fmt: skip
        self._sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        workers: list[Any] = []
        self.llm.collective_rpc(workers.append)
        self.worker = workers[0]
        self.model: torch.nn.Module = self.worker.get_model()
        self.checkpoint = checkpoint_of(directory, None, config)
        before = [(layer, name, one) for layer in self.model.modules() for name, one in layer._parameters.items()]
        self.traced = trace_loader(self.model.load_weights, self.model, self.checkpoint.manifest)
        for layer, name, one in before:
            layer._parameters[name] = one

    def step(self) -> None:
        self.llm.generate([{"prompt_token_ids": [3, 1, 2]}], self._sampling, use_tqdm=False)


def _hide_llvmlite(dispatcher: Any) -> None:
    """Keep llvmlite's modules from the search for kernels in vLLM's CPU build, which fails on objects of theirs."""
    rebind = dispatcher._rebind_kernels

    def rebinding(overrides: Any) -> None:
        with pytest.MonkeyPatch.context() as patched:
            for name in [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]:
                patched.delitem(sys.modules, name)
            rebind(overrides)

    dispatcher._rebind_kernels = rebinding


class TestVllm(AdapterContract):
    """A worker of ``vllm.LLM`` and the controls that ``attach`` makes."""

    deliveries: ClassVar[tuple[Delivery, ...]] = ("streamed",)
    vllm: ClassVar[_OneVllm]

    @pytest.fixture(autouse=True, scope="class")
    def one_vllm(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            settings = {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            }  # fmt: skip
            for name, value in settings.items():
                patched.setenv(name, value)
            type(self).vllm = _OneVllm(str(tmp_path_factory.mktemp("checkpoint")))
            yield

    def engine(self) -> tuple[Any, EngineAdapter]:
        from weightsync.engines.vllm.adapter import VllmWorkerAdapter
        from weightsync.engines.vllm.attaching import _Gate

        for parameter in self.vllm.model.parameters():
            parameter.data.normal_()
        gate = _Gate(self.vllm.llm)
        adapter = VllmWorkerAdapter(self.vllm.checkpoint, gate, None, torch.device("cpu"))
        self.vllm.worker.weight_transfer_engine._adapter = adapter
        return gate, adapter

    def installed(self, engine: Any) -> Mapping[str, torch.Tensor]:
        return {shard.name: shard.tensor.contiguous() for shard in self.vllm.traced.shards(self.vllm.model)}

    def generates(self, engine: Any) -> bool:
        try:
            with engine.used(0.1):
                self.vllm.step()
        except DeadlineExceeded:
            return False
        return True

    def go_on(self, engine: Any) -> None:
        engine.resume(5.0)
