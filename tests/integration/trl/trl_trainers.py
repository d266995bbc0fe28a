"""A program: one of TRL's own trainers, updated through weightsync, on this CPU; prints what the server said after each update.

``python trl_trainers.py KIND DIRECTORY URL`` for a server at URL that serves the checkpoint in DIRECTORY. The coordinator comes
from the environment. With two ranks it is started by ``torch.distributed.run``. After each update the weights that TRL itself
would have sent are loaded into a fresh Transformers model, in the dtype that is published, and its log-probabilities of fixed
prompts are compared with the server's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["WANDB_MODE"] = "disabled"

PROMPTS = [[20, 21, 22, 23, 24, 25], [100, 7, 300, 41], [9, 8, 7, 6, 5, 4, 3]]
STEPS = 3
Named = Iterable[tuple[str, torch.Tensor]]


class Oracle:
    """Compares the server with Transformers, and writes down how far they are apart."""

    def __init__(self, directory: str, url: str) -> None:
        self.directory, self.url = directory, url
        self.updates: list[dict[str, Any]] = []
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def served(self, model: str = "") -> list[torch.Tensor]:
        """The server's log-probability of each token of each prompt but the first."""
        found = []
        for prompt in PROMPTS:
            wish = {"model": model or self.directory, "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            answer = self.http.post("/v1/completions", json=wish).raise_for_status().json()
            rows = answer["choices"][0]["prompt_logprobs"]
            found.append(torch.tensor([row[str(token)]["logprob"] for row, token in zip(rows[1:], prompt[1:], strict=True)]))
        return found

    def expected(self, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        wrong = model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, strict=False)
        assert not wrong.unexpected_keys and set(wrong.missing_keys) <= {"lm_head.weight"}, wrong
        model.tie_weights()
        model.train(False)
        found = []
        for prompt in PROMPTS:
            with torch.inference_mode():
                scores = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
            found.append(scores[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
        return found

    def compare(self, weights: Named, result: Any) -> None:
        """On every rank, since ``weights`` may be gathered while they are read."""
        held = {name: tensor.detach().clone() for name, tensor in weights}
        if dist.is_initialized() and dist.get_rank():
            return
        pairs = list(zip(self.served(), self.expected(held), strict=True))
        (replica,) = result.replicas
        self.updates.append(
            {
                "apart": max(float((one - other).abs().max()) for one, other in pairs),
                "served": [round(value, 4) for one, _ in pairs for value in one.tolist()],
                "version": result.version.number,
                "label": self.http.get("/weight_info").json()["weight_version"],
                "state": replica.state,
                "verified": replica.verified,
            }
        )

    def compare_adapter(self, model: Any, result: Any, name: str) -> None:
        """The greedy answers of ``name`` are those of the PEFT model as the trainer holds it. On every rank, as it is gathered."""
        from torch.distributed.tensor import DTensor

        whole = {
            key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for key, value in model.state_dict().items()
        }
        if dist.is_initialized() and dist.get_rank():
            return
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        held = get_peft_model(
            AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32), model.peft_config["default"]
        )
        held.load_state_dict(whole)
        held.train(False)
        served, expected, answering = [], [], set()
        for prompt in PROMPTS:
            wish = {
                "model": name,
                "prompt": prompt,
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            body = self.http.post("/v1/completions", json=wish).raise_for_status().json()
            served.append(body["choices"][0]["token_ids"])
            answering.add(body["model"])
            tokens = list(prompt)
            with torch.inference_mode():
                for _ in range(12):
                    tokens.append(int(held(torch.tensor([tokens])).logits[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
        (replica,) = result.replicas
        self.updates.append(
            {
                "equal": served == expected,
                "served": [round(value, 4) for scores in self.served(name) for value in scores.tolist()],
                "answering": sorted(answering),
                "label": str(result.version),
                "base": self.http.get("/weight_info").json()["weight_version"],
                "nbytes": replica.nbytes,
                "adapter": sum(value.nbytes for key, value in whole.items() if "lora_" in key),
                "verified": replica.verified,
                "paused": replica.paused_seconds,
                "models": [entry["id"] for entry in self.http.get("/v1/models").json()["data"]],
            }
        )


def tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, padding_side="left")


def reward(completions: list[Any], **_: object) -> list[float]:
    """Differs within every group, so that every step changes the weights."""
    return [float(number % 2) for number, _ in enumerate(completions)]


def dataset(conversation: bool = False) -> Any:
    from datasets import Dataset

    prompts = [f"{number} {number + 1} {number + 2}" for number in range(10, 60)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in prompts] if conversation else prompts})


COMMON: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "per_device_train_batch_size": 2, "max_completion_length": 8, "max_steps": STEPS,
    "learning_rate": 5e-2, "report_to": "none", "save_strategy": "no", "gradient_checkpointing": False, "logging_steps": 1,
    "disable_tqdm": True,
}  # fmt: skip


def synchronous(kind: str, directory: str, oracle: Oracle) -> dict[str, Any]:
    """A trainer with ``vllm_mode="server"``: the one line, then TRL as its users write it."""
    from weightsync.integrations.trl import enable

    enable(timeout=60)
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    args: dict[str, Any] = COMMON | {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": oracle.url, "num_generations": 2, "beta": 0.0,
        "output_dir": f"{directory}/{kind}",
    }  # fmt: skip
    more: dict[str, Any] = {"reward_funcs": reward, "train_dataset": dataset()}
    if "lora" in kind or "adapter" in kind:
        more["peft_config"] = lora("embeddings" in kind)
    trainer: Any
    if kind == "rloo":
        trainer = RLOOTrainer(model=directory, args=RLOOConfig(**args), **more)
    else:
        if "embeddings" in kind:  # tied: merged, they are the output layer's too. The correction would make all gradients vanish
            args["vllm_importance_sampling_correction"] = False
        trainer = GRPOTrainer(model=directory, args=GRPOConfig(**args), **more)
    generation = trainer.vllm_generation
    synchronize = generation.sync_weights

    def checked() -> None:
        synchronize()
        if kind.startswith("adapter"):
            name = str(generation._weightsync.result.version)
            assert not trainer.accelerator.is_main_process or generation.vllm_client.model == name
            oracle.compare_adapter(generation.model, generation._weightsync.result, name)
        else:
            oracle.compare(generation._iter_named_params(), generation._weightsync.result)

    generation.sync_weights = checked
    asked: list[str] = []
    if trainer.accelerator.is_main_process:
        post = generation.vllm_client._post

        def noting(url: str, **kwargs: Any) -> Any:
            answer = post(url, **kwargs)
            asked.append(answer["model"])
            return answer

        generation.vllm_client._post = noting
    trainer.train()
    generation.sync_weights()  # the last step's weights
    if kind.endswith("fsdp2"):
        from torch.distributed.tensor import DTensor

        assert all(isinstance(one, DTensor) for one in generation.model.parameters())
    return {"metrics": sum("weightsync/update_s" in row for row in trainer.state.log_history), "asked": asked}


def lora(embeddings: bool = False) -> Any:
    from peft import LoraConfig

    modules = ["q_proj", "down_proj", *(["embed_tokens"] if embeddings else [])]
    return LoraConfig(r=4, lora_alpha=0.1 if embeddings else 8, target_modules=modules, init_lora_weights=False)


def accelerate_thinks_of_gpus() -> None:
    """Accelerate has FSDP for accelerators only: let it take this CPU's ranks for some."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ |= {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_RESHARD_AFTER_FORWARD": "true", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    made = PartialState.__init__

    def init(state: Any, *args: Any, **kwargs: Any) -> None:
        made(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def asynchronous(kind: str, directory: str, oracle: Oracle) -> dict[str, Any]:
    """``weight_transfer=WeightTransfer()``, and nothing else of weightsync."""
    from benchmarks.trl_training import without_flash_attention

    without_flash_attention()
    import trl.chat_template_utils as templates
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from weightsync.errors import WeightSyncError
    from weightsync.integrations.trl import WeightTransfer

    failure: dict[str, Any] = {}

    running: list[float] = []
    aborted: list[float] = []

    class Checked(WeightTransfer):
        def publish(self, trainer: Any) -> None:
            running.append(count("num_requests_running"))
            aborted.append(count(aborts))
            started = time.monotonic()
            if victim and oracle.updates:
                threading.Timer(0.005, os.kill, (victim, signal.SIGKILL)).start()  # in the second update
            try:
                super().publish(trainer)
            except WeightSyncError as error:
                failure.update(failed=f"{type(error).__name__}: {error}", seconds=time.monotonic() - started)
                raise
            assert self.result is not None
            model = trainer.accelerator.unwrap_model(trainer.model)
            if str(self.result.version).startswith(own := os.environ.get("WEIGHTSYNC_ADAPTER", "/")):
                oracle.compare_adapter(model, self.result, own)
            else:
                merges = hasattr(model, "merge_adapter")
                if merges:
                    model.merge_adapter()
                oracle.compare(trainer._streaming_iter(), self.result)
                if merges:
                    model.unmerge_adapter()
            aborted.append(count(aborts))

        def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
            raise AssertionError("TRL gathered")

    def count(name: str) -> float:
        """A figure of vLLM's own."""
        rows = [row for row in oracle.http.get("/metrics").text.splitlines() if row.startswith(f"vllm:{name}")]
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    aborts = 'request_success_total{engine="0",finished_reason="abort"'
    victim = int(os.environ.get("VICTIM", "0"))
    words = tokenizer(directory)
    words.response_template, words.response_schema = templates.qwen3_template, templates.qwen3_schema
    resumed = kind == "resume"
    folder = f"{directory}/{'async' if resumed else kind}"
    more: dict[str, Any] = {"max_completion_length": 200, "max_inflight_tasks": 8} if kind == "inflight" else {}
    args = AsyncGRPOConfig(
        **COMMON | {"save_strategy": "steps", "save_steps": STEPS, "max_steps": 2 * STEPS if resumed else STEPS} | more,
        output_dir=folder, vllm_server_base_url=oracle.url, num_generations=2, token_budget=512, max_staleness=4,
        gradient_accumulation_steps=1,
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        model=directory, reward_funcs=reward, args=args, train_dataset=dataset(True), processing_class=words,
        weight_transfer=Checked(timeout=60),
        peft_config=lora("embeddings" in kind) if "lora" in kind or "adapter" in kind else None,
    )  # fmt: skip
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS}" if resumed else None)
    except WeightSyncError:
        assert victim
    counted = {"running": running, "aborted": aborted[-1] - aborted[0]}
    asks = None if trainer.rollout_worker is None else trainer.rollout_worker._loop_kwargs["model_name"]
    steps = [row for row in trainer.state.log_history if "kl" in row]
    fresh = [row["kl"] for row in steps if not row.get("sample/staleness_max", 1)]
    return failure | counted | {"model_version": trainer.model_version, "asks": asks, "fresh": fresh}


def page(directory: str, oracle: Oracle) -> None:
    """The complete example of the page, as it stands there; then what it left on the server."""
    text = (Path(__file__).parents[3] / "docs" / "integrations" / "trl.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    sys.argv = ["train.py", directory, oracle.url]
    os.chdir(directory)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "train.py", "exec", dont_inherit=True), names)
    generation = names["trainer"].vllm_generation
    generation.sync_weights()
    oracle.compare(generation._iter_named_params(), generation._weightsync.result)


def main() -> int:
    kind, directory, url = sys.argv[1:]
    oracle = Oracle(directory, url)
    seen: dict[str, Any] = {}
    if kind.endswith("fsdp2"):
        accelerate_thinks_of_gpus()
    if kind.startswith("async") or kind in ("resume", "inflight"):
        seen = asynchronous(kind, directory, oracle)
    elif kind == "page":
        page(directory, oracle)
    else:
        seen = synchronous(kind, directory, oracle)
    if not dist.is_initialized() or not dist.get_rank():
        print("RESULT " + json.dumps(seen | {"updates": oracle.updates}), flush=True)
    return 0


if __name__ == "__mp_main__":  # TRL's worker for rollouts, which imports this file again
    from benchmarks.trl_training import without_flash_attention

    without_flash_attention()

if __name__ == "__main__":
    torch.set_num_threads(1)
    assert Path(sys.argv[2]).is_dir()
    sys.exit(main())
