"""The demo's small language models: real Transformers classes, a few million bfloat16 parameters."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from examples.demo.tokenizer import VOCABULARY
from weightsync.errors import ConfigurationError

__all__ = ["CONTEXT", "Architecture", "build_model", "scramble"]

Architecture = Literal["llama", "qwen2"]

CONTEXT = 256
"""Longest sequence in tokens."""


def build_model(architecture: Architecture, *, tied: bool, seed: int) -> PreTrainedModel:
    """A bfloat16 model on the CPU with the initial weights of this seed; ``tied``: the head is the embedding.

    Raises :class:`~weightsync.errors.ConfigurationError` for an architecture that is not ``llama`` or ``qwen2``.
    """
    torch.manual_seed(seed)
    # Only the wanted module is imported: all of Transformers would take several seconds in every process.
    if architecture == "llama":
        from transformers import LlamaConfig as Config
        from transformers import LlamaForCausalLM as Model
    elif architecture == "qwen2":
        from transformers import Qwen2Config as Config
        from transformers import Qwen2ForCausalLM as Model
    else:
        raise ConfigurationError(f"unknown architecture {architecture!r}; known: {', '.join(get_args(Architecture))}")
    config = Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=True,
    )
    model: PreTrainedModel = Model(config)
    torch.nn.Module.to(model, dtype=torch.bfloat16)  # in place
    return model


def scramble(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every parameter with noise, so that nothing which is not delivered can look right."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise))
