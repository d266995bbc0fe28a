"""A program: rounds into a real vLLM whose guesses come from a head on the model; prints what was seen as one line of JSON.

``python vllm_heads.py KIND DIRECTORY`` with a KIND of ``eagle`` (its own checkpoint) or ``mtp`` (in the model's). The last token
alone decides which is next, and the head sees just its embedding, taken from the model: with ``+1`` in the head's own tensor all
guesses are right, with ``-1`` none is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.integration.vllm.vllm_drafts import GUESSES, PREFIX, guessed
from tests.integration.vllm.vllm_rounds import BLOCK, PROMPTS, TOKENS, build, change, expected
from transformers import PreTrainedModel

ONES = ("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")  # of MiMo's heads


def forget_all_but_the_last_token(model: PreTrainedModel) -> None:
    """What attention and the multi-layer perceptrons add is nothing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
            elif name == "model.norm.weight":
                parameter.fill_(1)


def eagle(directory: Path) -> tuple[PreTrainedModel, dict[str, torch.Tensor], str, dict[str, Any]]:
    """A model, an EAGLE head's tensors under names with a prefix, that prefix, and what vLLM is told.

    The embedding in the head's checkpoint equals the model's, which vLLM then uses for both.
    """
    from safetensors.torch import save_file

    model = build(2, str(directory / "main"))
    state = {name.removeprefix("model."): one.detach().clone() for name, one in model.state_dict().items()}
    width = model.config.hidden_size
    head = {name: one for name, one in state.items() if name.startswith("layers.0.") and "input_layernorm" not in name}
    head |= {"embed_tokens.weight": state["embed_tokens.weight"], "fc.weight": torch.zeros(width, 2 * width, dtype=torch.bfloat16)}
    (directory / "head").mkdir()
    save_file(head, directory / "head/model.safetensors")
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (directory / "head/config.json").write_text(json.dumps(config, default=str))
    told = {"model": str(directory / "head"), "method": "eagle", "num_speculative_tokens": GUESSES}
    return model, {PREFIX + name: one for name, one in head.items()}, PREFIX, told


def mtp(directory: Path) -> tuple[PreTrainedModel, dict[str, torch.Tensor], str, dict[str, Any]]:
    """As :func:`eagle`: MiMo's heads, in a checkpoint that says so; the rest of that model is Qwen2's."""
    from safetensors.torch import load_file, save_file

    model = build(1, str(directory / "main"))
    prefix, width = "model.mtp_layers.0.", model.config.hidden_size
    head = {
        name.replace("model.layers.0.", prefix): one.detach().clone()
        for name, one in model.state_dict().items() if name.startswith("model.layers.0.")
    }  # fmt: skip
    head |= {prefix + name: torch.ones(width, dtype=torch.bfloat16) for name in ONES}
    head[prefix + "input_proj.weight"] = torch.zeros(width, 2 * width, dtype=torch.bfloat16)
    save_file(load_file(directory / "main/model.safetensors") | head, directory / "main/model.safetensors")
    config = json.loads((directory / "main/config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "main/config.json").write_text(json.dumps(config))
    return model, head, prefix, {"method": "mtp", "num_speculative_tokens": 1}


def train(head: dict[str, torch.Tensor], sign: float) -> None:
    """Guess what the model says next, or (``-1``) what it says last."""
    for name, one in head.items():
        if name.endswith(("fc.weight", "input_proj.weight")):
            one.zero_()
            one[:, -one.shape[0] if "input_proj" in name else 0 :].fill_diagonal_(sign)  # MiMo's has the embedding second
        elif name.endswith(ONES):
            one.fill_(1)
        elif "embed_tokens" not in name:
            one.zero_()


def play(kind: str, directory: Path) -> dict[str, Any]:
    """Rounds of which each brings a model and a head, which guesses right or wrong."""
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    import weightsync
    from weightsync.engines.vllm import attach

    model, head, prefix, told = {"eagle": eagle, "mtp": mtp}[kind](directory)
    llm = LLM(
        model=str(directory / "main"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
        block_size=BLOCK, max_num_seqs=8, weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        disable_log_stats=False, speculative_config=told,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    seen: dict[str, Any] = {"rounds": []}
    try:
        with weightsync.Trainer(dict(model.state_dict()) | head) as trainer:
            where, token = trainer.environment["WEIGHTSYNC_COORDINATOR"], trainer.environment["WEIGHTSYNC_TOKEN"]
            with attach(llm, "vllm", where, token=token, draft_prefix=prefix) as attached:
                for number, sign in enumerate([1.0, -1.0, 1.0], start=1):
                    change(model, number)
                    forget_all_but_the_last_token(model)
                    train(head, sign)
                    (replica,) = trainer.publish(number, timeout=60).replicas
                    with attached.in_use(30):
                        before = guessed(llm)
                        made = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
                        after = guessed(llm)
                    seen["rounds"].append({
                        "alike": sign > 0, "state": replica.state, "delivery": replica.delivery,
                        "guessed": after[0] - before[0], "right": after[1] - before[1],
                        "equal": [list(one.outputs[0].token_ids) for one in made] == expected(model),
                    })  # fmt: skip
    finally:
        llm.llm_engine.engine_core.shutdown()
    return seen


if __name__ == "__main__":
    here = Path(__file__).resolve()
    os.environ["PYTHONPATH"] = f"{here.parent}{os.pathsep}{here.parents[3]}"  # for what vLLM starts
    print("RESULT " + json.dumps(play(sys.argv[1], Path(sys.argv[2]))), flush=True)
