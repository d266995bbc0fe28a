"""A program: rounds into a real vLLM that guesses tokens with a draft model; prints what was seen as one line of JSON.

``python vllm_drafts.py DIRECTORY``. The draft has the model's architecture, so that right after a round that published the same
weights to both every guess is accepted, and with other weights none is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.vllm.vllm_rounds import BLOCK, PROMPTS, TOKENS, build, change, expected

GUESSES = 3
PREFIX = "draft."


def guessed(llm: Any) -> tuple[int, int]:
    """How many tokens were guessed so far, and how many of them were right."""
    counts = {
        one.name: one.value for one in llm.get_metrics() if one.name.startswith("vllm:spec_decode_num_") and hasattr(one, "value")
    }
    return int(counts["vllm:spec_decode_num_draft_tokens"]), int(counts["vllm:spec_decode_num_accepted_tokens"])


def play(directory: Path) -> dict[str, Any]:
    """Rounds of which each brings a model and a draft, alike or not."""
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    import weightsync
    from weightsync.engines.vllm import attach

    model, draft = build(2, str(directory / "main")), build(2, str(directory / "draft"))
    llm = LLM(
        model=str(directory / "main"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
        block_size=BLOCK, max_num_seqs=8, weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        disable_log_stats=False, speculative_config={
            "model": str(directory / "draft"), "method": "draft_model", "num_speculative_tokens": GUESSES,
        },
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    both = dict(model.state_dict()) | {PREFIX + name: value for name, value in draft.state_dict().items()}
    seen: dict[str, Any] = {"rounds": []}
    try:
        with weightsync.Trainer(both) as trainer:
            where, token = trainer.environment["WEIGHTSYNC_COORDINATOR"], trainer.environment["WEIGHTSYNC_TOKEN"]
            with attach(llm, "vllm", where, token=token, draft_prefix=PREFIX) as attached:
                for number, (of_model, of_draft) in enumerate([(1, 1), (2, 7), (3, 3)], start=1):
                    change(model, of_model)
                    change(draft, of_draft)
                    (replica,) = trainer.publish(number, timeout=60).replicas
                    with attached.in_use(30):
                        before = guessed(llm)
                        made = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
                        after = guessed(llm)
                    seen["rounds"].append({
                        "alike": of_model == of_draft, "state": replica.state, "delivery": replica.delivery,
                        "guessed": after[0] - before[0], "right": after[1] - before[1],
                        "equal": [list(one.outputs[0].token_ids) for one in made] == expected(model),
                    })  # fmt: skip
    finally:
        llm.llm_engine.engine_core.shutdown()
    return seen


if __name__ == "__main__":
    here = Path(__file__).resolve()
    os.environ["PYTHONPATH"] = f"{here.parent}{os.pathsep}{here.parents[3]}"  # for what vLLM starts
    print("RESULT " + json.dumps(play(Path(sys.argv[1]))), flush=True)
