"""A program: Megatron-core ranks publish to a real vLLM on this CPU; prints what was seen as one line of JSON.

``python vllm_megatron.py CASE ENGINE DIRECTORY`` with a :class:`~tests.integration.megatron.megatron_cases.Case` and further
arguments of ``vllm.LLM`` as JSON. Its workers import this file again, and must not find numba loaded (see ``vllm_rounds.py``).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.integration.megatron.megatron_cases import VOCABULARY, Case, hf_config

TOKENS = 12
PROMPTS = [[(7 * row + 5 * column * (row + 1)) % (VOCABULARY - 1) + 1 for column in range(70)] for row in range(3)]


def expected(model: Any) -> list[list[int]]:
    """Greedy answers of Transformers."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(TOKENS):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


class Stages:
    """What vLLM's workers lack on a CPU: a later pipeline stage keeps what it receives in memory that only a warm-up makes.

    The CPU build makes none without compilation. This is what ``GPUModelRunner._dummy_run`` does.
    """

    model_runner: Any

    def make_room(self) -> None:
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def count_layers(self) -> int:
        names = (name.split(".") for name, _ in self.model_runner.model.named_parameters())
        return len({parts[2] for parts in names if parts[1] == "layers"})


def play(case: Case, engine: dict[str, Any], directory: Path) -> dict[str, Any]:
    from tests.integration.megatron.megatron_process import Ranks
    from tests.integration.megatron.megatron_reference import reference, stacked
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    from weightsync.engines.vllm import attach

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(hf_config(case.family, case.changes), dtype=torch.bfloat16)
    model.save_pretrained(directory / "model")
    torch.nn.Module.to(model, dtype=torch.float32)  # in place: the reference
    llm = LLM(
        model=str(directory / "model"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128,
        block_size=32, max_num_seqs=8, weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        worker_extension_cls="vllm_megatron.Stages", **engine,
    )  # fmt: skip
    llm.collective_rpc("make_room")
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

    def answers() -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    ranks, folder = Ranks(directory), directory / "ranks"
    folder.mkdir()
    layers = llm.collective_rpc("count_layers")
    seen: dict[str, Any] = {"before": answers() == expected(model), "layers": layers, "versions": []}
    try:
        ranks.begin(case, folder)
        environment = ranks.read("environment")["environment"]
        with attach(llm, "vllm-0", environment["WEIGHTSYNC_COORDINATOR"], token=environment["WEIGHTSYNC_TOKEN"]) as attached:
            for version in range(1, case.versions + 1):
                replicas = ranks.read("published")["replicas"]
                state = reference(case, folder, version)
                model.load_state_dict(stacked(state) if "moe" in case.family else state)
                with attached.in_use(30):
                    entry = {"replicas": replicas, "answers": answers(), "expected": expected(model)}
                seen["versions"].append(entry)
                if version == case.versions:
                    break
                ranks.write("")
        ranks.write("")
        ranks.end()
    finally:
        ranks.close()
        llm.llm_engine.engine_core.shutdown()
    return seen


def main() -> int:
    case, engine, directory = Case(**json.loads(sys.argv[1])), json.loads(sys.argv[2]), Path(sys.argv[3])
    print("RESULT " + json.dumps(play(case, engine, directory)), flush=True)
    return 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for what vLLM starts
    sys.exit(main())
