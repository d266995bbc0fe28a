"""What one run of the demo is asked to do: frozen, checked where it enters, handed on to its processes as JSON."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

import msgspec

from examples.demo.records import Order
from weightsync.config import Address
from weightsync.errors import ConfigurationError
from weightsync.model import PauseMode
from weightsync.protocol.messages import Delivery

__all__ = ["KILLED", "ReplicaSettings", "Role", "Settings", "TrainerSettings"]

Role = Literal["all", "trainer", "replica", "client"]
Architecture = Literal["llama", "qwen2"]
EngineName = Literal["transformers", "vllm"]
TrainerName = Literal["fsdp", "megatron"]
OptimizerName = Literal["adamw", "muon"]

KILLED = ("replica", "trainer", "coordinator")
"""What ``--kill`` kills, one in the round of each version from the second on."""

RATE = 4e-3
"""The learning rate, unless another one is given."""

_MOST_ADAPTERS = 100
_MOST = {"trainer_ranks": 16, "replicas": 16, "versions": 1000, "steps": 10_000, "engine_tp": 8}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole demo, or with ``role`` one part of it, which then needs ``coordinator`` (and, with a client, ``directory``).

    Raises :class:`~weightsync.errors.ConfigurationError` for values that make no sense.
    """

    trainer: TrainerName = "fsdp"
    trainer_ranks: int = 2
    replicas: int = 2
    versions: int = 4
    steps: int = 6
    """Optimizer steps before each version."""
    transport: str = "auto"
    delivery: Delivery = "auto"
    engine: EngineName = "transformers"
    engine_tp: int = 1
    """Tensor-parallel ranks of each replica; vLLM only."""
    model: Architecture = "llama"
    tied: bool = True
    pause_mode: PauseMode = "keep"
    optimizer: OptimizerName = "adamw"
    """``muon`` for matrices, with AdamW for the rest."""
    learning_rate: float = RATE
    deltas: bool = False
    """Float32 weights at the trainer, published in bfloat16, of which only changed words cross; all bytes to the last replica."""
    adapters: int = 0
    """LoRA adapters, each with one version for every version of the base weights."""
    keep: int = 2
    """Versions of each adapter that replicas go on serving."""
    kill: bool = False
    """Kill a replica, a trainer rank and the coordinator, each in the middle of a round, and start them again."""
    store: str | None = None
    """Folder in which the trainer stores every version."""
    kill_trainer: bool = False
    """End the trainer for good after the last version, and start another replica, which joins from the store."""
    seed: int = 0
    json: bool = False
    timeout: float = 600.0
    """Seconds after which the demo gives up."""
    role: Role = "all"
    coordinator: str | None = None
    """An existing coordinator's URL (its token in ``WEIGHTSYNC_TOKEN``); without one, one is started here."""
    token_file: Path | None = None
    """The token of the coordinator that the demo starts, instead of a new one, so that its page and commands can be used."""
    directory: Path | None = None
    """Where the checkpoints of each version go. Without one, a temporary directory. Several machines must share it."""
    host: str = "127.0.0.1"
    """Address on which replicas serve completions."""
    replica_prefix: str = "replica"
    replica_urls: tuple[str, ...] = ()
    """For a client alone: the replicas to send requests to."""

    def __post_init__(self) -> None:
        """Check each value."""
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be from 1 to {most}, not {getattr(self, name)}")
        for name, kind in (
            ("trainer", TrainerName),
            ("model", Architecture),
            ("delivery", Delivery),
            ("engine", EngineName),
            ("pause_mode", PauseMode),
            ("optimizer", OptimizerName),
            ("role", Role),
        ):
            if getattr(self, name) not in get_args(kind):
                flag, known = name.replace("_", "-"), ", ".join(get_args(kind))
                raise ConfigurationError(f"--{flag} is one of {known}, not {getattr(self, name)!r}")
        if self.engine == "vllm":
            if find_spec("vllm") is None:
                raise ConfigurationError("--engine vllm needs vLLM, which is not installed here: see docs/guides/vllm.md")
            if self.delivery == "direct":
                raise ConfigurationError("vLLM repacks weights as it loads them: use --delivery auto or streamed")
        elif self.engine_tp != 1:
            raise ConfigurationError("--engine-tp needs --engine vllm: the transformers engine has one rank")
        if self.trainer == "megatron":
            if find_spec("megatron") is None:
                raise ConfigurationError("--trainer megatron needs megatron-core: pip install 'weightsync[megatron]'")
            if self.trainer_ranks > 2:
                raise ConfigurationError("--trainer megatron cuts the model's two key/value heads: at most --trainer-ranks 2")
        if not 0 < self.learning_rate < 1:
            raise ConfigurationError(f"--learning-rate must be between 0 and 1, not {self.learning_rate}")
        if self.trainer == "megatron" and (self.optimizer != "adamw" or self.deltas):
            raise ConfigurationError("--optimizer and --deltas need --trainer fsdp")
        if self.deltas and (self.engine != "transformers" or self.delivery == "streamed"):
            raise ConfigurationError("--deltas needs direct delivery, and --engine transformers")
        if not 0 <= self.adapters <= _MOST_ADAPTERS:
            raise ConfigurationError(f"--adapters must be from 0 to {_MOST_ADAPTERS}, not {self.adapters}")
        if self.keep < 1:
            raise ConfigurationError(f"--keep must be at least 1, not {self.keep}")
        if self.adapters:
            if self.engine != "transformers" or self.trainer != "fsdp" or self.role != "all" or self.coordinator is not None:
                raise ConfigurationError("--adapters needs every process on this machine, --trainer fsdp and --engine transformers")
            if self.kill or self.kill_trainer:
                raise ConfigurationError("--adapters goes without --kill and --kill-trainer: who joins late has no old versions")
        if self.kill:
            if self.deltas or self.optimizer != "adamw":
                raise ConfigurationError(
                    "--kill resumes from bfloat16 checkpoints with AdamW's state: leave --deltas and --optimizer out"
                )
            if self.engine != "transformers" or self.trainer != "fsdp" or self.role != "all" or self.coordinator is not None:
                raise ConfigurationError("--kill needs every process on this machine, --trainer fsdp and --engine transformers")
            if self.versions <= len(KILLED):
                raise ConfigurationError(
                    f"--kill kills in versions 2 to {len(KILLED) + 1}: give --versions {len(KILLED) + 1} or more"
                )
        if self.kill_trainer:
            if self.store is None or self.kill:
                raise ConfigurationError("--kill-trainer needs --store DIR, and goes without --kill")
            if self.role != "all" or self.coordinator is not None:
                raise ConfigurationError("--kill-trainer needs every process on this machine")
        if self.token_file is not None and self.coordinator is not None:
            raise ConfigurationError(
                "--token-file is for the coordinator that the demo starts; for --coordinator, set WEIGHTSYNC_TOKEN"
            )
        if self.timeout <= 0:
            raise ConfigurationError(f"--timeout must be positive, not {self.timeout}")
        if self.coordinator is not None:
            Address.parse(self.coordinator)  # before anything is said or started
        if self.role != "all" and self.coordinator is None:
            raise ConfigurationError(f"--role {self.role} is a part of a demo on several machines: give --coordinator URL")
        if self.role in ("trainer", "client") and self.directory is None:
            raise ConfigurationError(f"--role {self.role} needs --directory: trainer and client share the checkpoints there")
        if (self.role == "client") != bool(self.replica_urls):
            raise ConfigurationError("--role client needs --replica-url for each replica, and only it takes them")

    @property
    def transports(self) -> tuple[str, ...] | None:
        """The transports allowed, ``None`` for all that work here."""
        return None if self.transport == "auto" else (self.transport,) if self.store is None else (self.transport, "store")

    def for_children(self) -> Settings:
        """What concerns every process, without what only the main one does: its role and its paths."""
        return msgspec.structs.replace(self, role="all", token_file=None, directory=None, replica_urls=(), kill_trainer=False)


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer rank's process."""

    parent: int
    rank: int
    world_size: int
    epoch: int
    resume: Order | None
    """The version from whose checkpoint to go on."""
    port: int
    """Where rank 0's rendezvous listens, on loopback."""
    listen_fd: int | None
    """Rank 0: the socket for it, bound already, so that nobody can take the port in between."""
    directory: str
    coordinator: str
    settings: Settings


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's process."""

    parent: int
    name: str
    listen_fd: int
    """The socket for completions, bound already."""
    directory: str
    """For files of the replica's own; removed when the demo ends."""
    coordinator: str
    settings: Settings
