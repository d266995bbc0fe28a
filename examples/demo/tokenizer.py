"""A byte-level BPE tokenizer, trained from nothing on the demo's own text; the same in every process for the same seed."""

from __future__ import annotations

from itertools import islice

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from examples.demo.tasks import documents

__all__ = ["END", "VOCABULARY", "build_tokenizer", "encode", "token_stream"]

END = "<|end|>"
VOCABULARY = 384
"""Tokens, the 256 bytes and the end of a document among them."""
_TRAINED_ON = 400


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train on the first documents of this seed; takes a few hundredths of a second."""
    inner = Tokenizer(BPE())
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    inner.train_from_iterator(islice(documents(seed), _TRAINED_ON), trainer)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token numbers of ``text``, none added."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def token_stream(tokenizer: PreTrainedTokenizerFast, seed: int, count: int) -> list[int]:
    """The first ``count`` tokens of this seed's documents, each document closed by the end token."""
    tokens: list[int] = []
    for document in documents(seed):
        tokens += encode(tokenizer, document + END)
        if len(tokens) >= count:
            return tokens[:count]
    raise AssertionError("documents() has no end")
