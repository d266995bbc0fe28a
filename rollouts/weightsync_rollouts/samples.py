"""Requests to a rollout engine and their results: tokens, each with its log-probability and its version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.model import FIRST_EPOCH

FinishReason = Literal["stop", "length", "abort"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters.

    Raises:
        ConfigurationError: No engine accepts these values.
    """

    max_tokens: int = 16
    """Limit for the whole sample, over all interruptions."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    """Seed of the first request. A continuation uses ``seed + tokens kept``, so that it does not repeat the same tokens."""
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = True
    """Whether to request the log-probability of each sampled token."""

    def __post_init__(self) -> None:
        """Check each value."""
        if self.max_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigurationError(f"max_tokens must be at least 1, temperature at least 0 and top_p in (0, 1], not {self}")


class Chunk(msgspec.Struct, frozen=True):
    """Content of one message of a server. The version of a token may follow in a later message."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    """One for each token; ``None`` if the server reports none."""
    versions: tuple[int, ...] = ()
    """Versions that the server reports in this message, for tokens in order since the start of the request."""
    finish_reason: FinishReason | None = None
    epochs: tuple[int, ...] = ()
    """Epochs of the same tokens, if the server reports them. Otherwise the epoch is the replica's at the time of the request."""


@dataclass
class Sample:
    """Completion of one prompt. All lists have one entry for each token."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities under the weights that generated the token; empty if not requested or not reported."""
    versions: list[int] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    interruptions: int = 0
    """Number of requests that a pause or a lost server interrupted, each continued by another request."""
    lost_tokens: int = 0
    """Tokens that were dropped because their server disconnected before it reported their version."""
    epochs: list[int] = field(default_factory=list)
    """Epochs of the versions. A version of a later epoch is newer, whatever its number. Empty if all are of the first epoch."""

    @property
    def oldest_first(self) -> tuple[int, int] | None:
        """Epoch and number of the oldest version among the tokens; ``None`` without tokens."""
        epochs = self.epochs or [FIRST_EPOCH] * len(self.versions)
        return min(zip(epochs, self.versions, strict=True), default=None)

    @property
    def oldest(self) -> int | None:
        """Number of the oldest version among the tokens; ``None`` without tokens."""
        return None if self.oldest_first is None else self.oldest_first[1]

    def keep(self, replica: str, chunks: Sequence[Chunk], epoch: int = FIRST_EPOCH) -> None:
        """Append the tokens of one request whose versions are reported, and drop the others.

        Args:
            replica: Name of the replica that generated them.
            chunks: The messages, in order.
            epoch: Epoch of versions for which the server reports none.

        Raises:
            ProtocolError: The numbers of tokens, versions, epochs and log-probabilities contradict each other.
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
            raise ProtocolError(f"{replica} and earlier replicas of this sample disagree on whether to return log-probabilities")
        kept = len(versions)
        self.lost_tokens += len(tokens) - kept
        self.tokens += tokens[:kept]
        self.versions += versions
        self.epochs += epochs
        self.replicas += [replica] * kept
        self.logprobs += logprobs[:kept]
