"""The policy: a Llama of some 84,000 parameters in float32, and its short supervised beginning."""

from __future__ import annotations

from itertools import islice

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from examples.grpo.task import ANSWER_TOKENS, END, VOCABULARY, sloppy_examples

__all__ = ["CONTEXT", "build_policy", "log_probabilities", "warm_up"]

CONTEXT = 64
"""Longest sequence in tokens; vLLM wants blocks of 32 on a CPU, and heads of 32."""
_HIDDEN, _HEAD, _LAYERS = 64, 32, 2
_BATCH, _RATE, _WRONG = 64, 3e-3, 0.7


def build_policy(seed: int) -> PreTrainedModel:
    """Initial weights of this seed, the same in every process."""
    torch.manual_seed(seed)
    heads = _HIDDEN // _HEAD
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=_HIDDEN, intermediate_size=2 * _HIDDEN, num_hidden_layers=_LAYERS,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def log_probabilities(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """``[rows, length - 1]``: of each token but the first, given those before it. Rows are padded at their end."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    chosen: torch.Tensor = functional.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
    return chosen


def warm_up(model: torch.nn.Module, seed: int, steps: int) -> float:
    """Learn from a teacher that is often wrong, so that reward has something to improve. Returns the last loss."""
    examples = sloppy_examples(seed, _WRONG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, 2 * (steps - step) / steps)
        batch = torch.tensor(list(islice(examples, _BATCH)))
        loss = -log_probabilities(model, batch)[:, -ANSWER_TOKENS:].mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())
