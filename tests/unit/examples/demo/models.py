"""A model small enough to generate hundreds of tokens a second, and checkpoints of it."""

from __future__ import annotations

from pathlib import Path

import torch
from examples.demo.oracle import checkpoint_path
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from weightsync.model import Version

__all__ = ["VOCABULARY", "save_version", "tiny_model", "version"]

VOCABULARY = 64


def tiny_model(seed: int) -> PreTrainedModel:
    """One layer, 64 tokens, lively weights: its greedy output depends on all of the prompt and on the seed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def version(number: int) -> Version:
    """A version of no particular bytes."""
    return Version("test", number, "0" * 32, f"{number:016x}")


def save_version(directory: Path, number: int, model: PreTrainedModel, epoch: int = 1) -> None:
    """Save the model's weights where the oracle looks for version ``number`` of ``epoch``."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, checkpoint_path(directory, (epoch, number)))
