"""What a run is asked to do: frozen, checked where it enters, handed to its processes as JSON."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, get_args

import msgspec

from weightsync.errors import ConfigurationError

__all__ = ["EngineName", "Mode", "ReplicaSettings", "Settings", "TrainerSettings"]

Mode = Literal["one-step-off", "async"]
EngineName = Literal["demo", "vllm"]

_MOST = {"replicas": 8, "trainer_ranks": 2, "steps": 100_000, "groups": 256, "group_size": 64, "warm_up": 10_000, "updates": 8}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Raises :class:`~weightsync.errors.ConfigurationError` for values that make no sense."""

    mode: Mode = "async"
    """``one-step-off``: a batch is made by the version before, while the trainer learns from the batch before, and every version is
    waited for. ``async``: whatever is within the bound, and nobody waits for anybody."""
    staleness: int | None = None
    """Versions by which a token may be behind the trainer that learns from it. ``None``: 1 one step off, 3 async."""
    engine: EngineName = "demo"
    replicas: int = 2
    trainer_ranks: int = 1
    """1: a plain module. 2: FSDP2."""
    steps: int = 200
    groups: int = 8
    """Problems in a batch."""
    group_size: int = 8
    """Answers to each."""
    updates: int = 1
    """Optimizer steps on each batch."""
    rate: float = 3e-4
    warm_up: int = 120
    """Supervised steps before the first version."""
    seed: int = 0
    timeout: float = 3600.0
    """Seconds after which the run gives up."""

    def __post_init__(self) -> None:
        """Check each value."""
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be from 1 to {most}, not {getattr(self, name)}")
        for name, kind in (("mode", Mode), ("engine", EngineName)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigurationError(f"--{name} is one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
        if self.mode == "one-step-off" and self.staleness not in (None, 1):
            raise ConfigurationError("--mode one-step-off has a staleness of 1: leave --staleness out, or use --mode async")
        if self.bound < 0 or self.rate <= 0 or self.timeout <= 0 or self.group_size < 2:
            raise ConfigurationError("--staleness is at least 0, --rate and --timeout are positive, --group-size is at least 2")
        if self.engine == "vllm" and find_spec("vllm") is None:
            raise ConfigurationError("--engine vllm needs vLLM, which is not installed here: see docs/guides/vllm.md")

    @property
    def bound(self) -> int:
        """The staleness bound in force."""
        return self.staleness if self.staleness is not None else 1 if self.mode == "one-step-off" else 3


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer rank's process."""

    parent: int
    rank: int
    port: int
    """Where rank 0's rendezvous listens, on loopback."""
    listen_fd: int | None
    """Rank 0: the socket for it, bound already."""
    coordinator: str
    urls: dict[str, str]
    """Where each replica generates."""
    settings: Settings


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's process."""

    parent: int
    name: str
    index: int
    listen_fd: int
    """A socket that has the replica's port."""
    coordinator: str
    directory: str
    """For files of the replica's own."""
    settings: Settings
