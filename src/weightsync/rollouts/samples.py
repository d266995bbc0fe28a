"""What is asked of a rollout engine, and what comes back: tokens, each with its log-probability and its version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.model import FIRST_EPOCH

__all__ = ["Chunk", "FinishReason", "Sample", "Sampling"]

FinishReason = Literal["stop", "length", "abort"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. Raises :class:`~weightsync.errors.ConfigurationError` for what no engine takes."""

    max_tokens: int = 16
    """For the whole sample, over all interruptions."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    """Of the first request. One that goes on after an interruption asks with ``seed + tokens kept``, lest it repeats itself."""
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = True
    """Whether the sampled token's log-probability is asked for."""

    def __post_init__(self) -> None:
        """Check each value."""
        if self.max_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigurationError(f"max_tokens at least 1, temperature at least 0, top_p in (0, 1], not {self}")


class Chunk(msgspec.Struct, frozen=True):
    """What one message of a server adds. A token without a version is not known to be of any weights yet."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    """One a token, or ``None`` where the server says none."""
    versions: tuple[int, ...] = ()
    """Of tokens in order since the request began, as far as the server attests them in this message."""
    finish_reason: FinishReason | None = None
    epochs: tuple[int, ...] = ()
    """Of the same tokens, where the server attests it. Else the epoch is that of the replica when it was asked."""


@dataclass
class Sample:
    """The answer to one prompt. All lists have one entry a token."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Under the weights that made the token; empty if not asked for or not said (the demo's server says none)."""
    versions: list[int] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    interruptions: int = 0
    """How often a request for it was cut off, by a pause or a lost server, and gone on with."""
    lost_tokens: int = 0
    """Tokens that arrived and were dropped, since their server went away before it attested their version."""
    epochs: list[int] = field(default_factory=list)
    """Of the versions: of a later epoch, even a smaller number is newer. Empty: all are of the first."""

    @property
    def oldest_first(self) -> tuple[int, int] | None:
        """Epoch and number of the oldest version of any token; ``None`` without tokens."""
        epochs = self.epochs or [FIRST_EPOCH] * len(self.versions)
        return min(zip(epochs, self.versions, strict=True), default=None)

    @property
    def oldest(self) -> int | None:
        """The number of the oldest version of any token; ``None`` without tokens."""
        return None if self.oldest_first is None else self.oldest_first[1]

    def keep(self, replica: str, chunks: Sequence[Chunk], epoch: int = FIRST_EPOCH) -> None:
        """Add what one request brought, as far as its versions are attested. ``epoch`` is theirs where the server says none.

        Raises :class:`~weightsync.errors.ProtocolError` if it does not fit together.
        """
        tokens = [token for chunk in chunks for token in chunk.tokens]
        versions = [version for chunk in chunks for version in chunk.versions]
        epochs = [number for chunk in chunks for number in chunk.epochs or (epoch,) * len(chunk.versions)]
        logprobs = [value for chunk in chunks for value in chunk.logprobs or ()]
        has_logprobs = bool(logprobs)
        if len(versions) > len(tokens) or len(epochs) != len(versions) or (has_logprobs and len(logprobs) != len(tokens)):
            raise ProtocolError(
                f"{replica} answered {len(tokens)} tokens with {len(versions)} versions and {len(logprobs)} log-probabilities"
            )
        if self.tokens and tokens and has_logprobs != bool(self.logprobs):
            raise ProtocolError(f"{replica} and the replicas before it do not agree on whether to say log-probabilities")
        kept = len(versions)
        self.lost_tokens += len(tokens) - kept
        self.tokens += tokens[:kept]
        self.versions += versions
        self.epochs += epochs
        self.replicas += [replica] * kept
        self.logprobs += logprobs[:kept]
