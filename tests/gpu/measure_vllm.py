# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
"""Direct delivery into a real vLLM on one GPU: ``python -m tests.gpu.measure_vllm tiny|MODEL [ROUNDS]``, with vLLM on the path.

``tiny``: a small random Qwen3 checkpoint; a scrambled engine is written directly, and must hold the bits that vLLM's own loader
puts there, and give the tokens that Transformers gives, with CUDA graphs captured before. ``MODEL``: a model of the GPU suite,
shapes only; pause to resume is timed. Trainer and engine are two processes; the trainer has the last GPU, vLLM the first.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch

from weightsync.model import Manifest, TensorSpec
from weightsync.roles.adapter import EngineAdapter
from weightsync.tensors.tracing import trace_loader

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPT = [3, 17, 42, 5, 99, 250, 7, 8]


def tiny(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def start(folder, dummy):
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(
        model=str(folder), load_format="dummy" if dummy else "auto", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        gpu_memory_utilization=0.45 if dummy else 0.1, max_model_len=256, max_num_seqs=4, enforce_eager=False,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
    )  # fmt: skip
    print(f"vLLM started in {time.perf_counter() - began:.1f} s", flush=True)
    return llm


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def tokens(llm, count=24):
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    (found,) = llm.generate([{"prompt_token_ids": PROMPT}], wanted, use_tqdm=False)
    return list(found.outputs[0].token_ids)


class Traced(EngineAdapter):
    """The parameters of vLLM's model, as its own loader fills them."""

    name = "vllm-in-process"

    def __init__(self, llm, manifest) -> None:
        self.llm, self._manifest, self.times = llm, manifest, {}
        model = model_of(llm)
        began = time.perf_counter()
        traced = trace_loader(model.load_weights, model, manifest)
        self.reason = traced.reason()
        print(f"traced in {time.perf_counter() - began:.2f} s: {len(traced.copies)} copies; reason against direct: {self.reason}")
        print(
            "unwritten", dict(list(traced.unwritten.items())[:5]), "fallback", dict(list(traced.fallback.items())[:3]), flush=True
        )
        self._shards = traced.shards(model)

    def manifest(self):
        return self._manifest

    def shards(self):
        return self._shards

    def pause(self, mode, timeout):
        self.times["paused"] = time.monotonic()

    def flush(self):
        return bool(self.llm.reset_prefix_cache())

    def resume(self):
        self.times["resumed"] = time.monotonic()


def check_tiny():
    from safetensors.torch import load_file

    from weightsync.agents.engine import Engine
    from weightsync.agents.trainer import Trainer
    from weightsync.service.server import BackgroundServer
    from weightsync.service.settings import ServerSettings

    with tempfile.TemporaryDirectory() as folder:
        reference = tiny(folder)
        ids = torch.tensor([PROMPT])
        expected = (
            reference.cuda().generate(ids.cuda(), max_new_tokens=24, do_sample=False, eos_token_id=None)[0, len(PROMPT) :].tolist()
        )
        checkpoint = {name: tensor.cuda() for name, tensor in load_file(str(Path(folder) / "model.safetensors")).items()}
        llm = start(folder, dummy=False)
        own = {name: value.detach().clone() for name, value in model_of(llm).named_parameters()}
        print("vLLM's own loading gives Transformers' tokens:", tokens(llm) == expected)
        adapter = Traced(llm, Manifest(TensorSpec(n, tuple(t.shape), "bfloat16") for n, t in checkpoint.items()))
        with torch.no_grad():
            for value in model_of(llm).parameters():
                value.view(torch.int16).random_(0, 15000)
        scrambled = tokens(llm)
        with (
            BackgroundServer(ServerSettings.load({}, port=0)) as server,
            Trainer(checkpoint, server.url, token=server.token) as trainer,
            Engine(adapter, "vllm", server.url, token=server.token, delivery="direct"),
        ):
            (replica,) = trainer.publish(1, timeout=60).replicas
        same = all(torch.equal(own[n].view(torch.int16), v.view(torch.int16)) for n, v in model_of(llm).named_parameters())
        after = tokens(llm)
        print(json.dumps({
            "delivery": replica.delivery, "transports": replica.transports, "verified": replica.verified, "same_bits": same,
            "tokens_equal_transformers": after == expected, "scrambled_differed": scrambled != expected,
        }), flush=True)  # fmt: skip


def measure(model, rounds):
    from weightsync.agents.engine import Engine
    from weightsync.bench.gpu_job import manifest_for
    from weightsync.bench.peer import Peer
    from weightsync.service.server import BackgroundServer
    from weightsync.service.settings import ServerSettings

    job = {"name": "vllm", "model": model, "delivery": "direct", "on": [torch.cuda.device_count() - 1], "to": [0]}
    with tempfile.TemporaryDirectory() as folder, BackgroundServer(ServerSettings.load({}, port=0, heartbeat=60.0)) as server:
        (Path(folder) / "config.json").write_text(json.dumps(MOE))
        llm = start(folder, dummy=True)
        adapter = Traced(llm, manifest_for(model))
        before = tokens(llm, 8)
        with Peer("weightsync.bench.gpu_rank", {"role": "trainer", "rank": 0, "job": job}) as trainer:
            print(trainer.hear(120))
            trainer.ask(do="join", url=server.url, token=server.token)
            with Engine(adapter, "vllm", server.url, token=server.token, delivery="direct"):
                for version in range(rounds):
                    trainer.ask(do="change", version=version)
                    told = trainer.ask(do="publish", version=version)
                    if "error" in told:
                        raise RuntimeError(told["error"])
                    (replica,) = told["answer"]["result"]["replicas"]
                    answer = {
                        "version": replica["version"],
                        "verified": replica["verified"],
                        "phases_ms": {name: round(1000 * value, 2) for name, value in replica["phases"].items()},
                        "parts_ms": {name: round(1000 * value, 2) for name, value in replica["parts"].items()},
                        "paused_ms": round(1000 * replica["paused_seconds"], 2),
                        "publish_ms": round(1000 * (told["answer"]["ended"] - told["answer"]["begun"]), 2),
                    }
                    print(json.dumps(answer), flush=True)
        print("generates with the graphs captured before:", tokens(llm, 8) != before)


if __name__ == "__main__":
    if sys.argv[1] == "tiny":
        check_tiny()
    else:
        measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4)
    sys.stdout.flush()
    os._exit(0)
