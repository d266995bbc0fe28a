"""New weights from a trainer to serving engines: shard to shard, verified, never torn.

The names below are the public ones. They are loaded when first used, so that ``import weightsync`` stays quick and needs no
tensor library: the coordinator and the command line run without one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.config import Timeouts
    from weightsync.engine.adapter import EngineAdapter
    from weightsync.engine.engine import Engine
    from weightsync.engine.receiver import Receiver
    from weightsync.engines.module import ModuleAdapter
    from weightsync.errors import (
        Aborted,
        AuthenticationError,
        BroadcastBroken,
        ConfigurationError,
        CoordinatorUnreachable,
        DeadlineExceeded,
        LayoutError,
        LoadError,
        ManifestMismatch,
        MembershipError,
        PeerLost,
        PlanMismatch,
        ProtocolError,
        RoundFailed,
        SharedMemoryTooSmall,
        StaleSource,
        TransportError,
        TransportUnavailable,
        VerificationError,
        VersionError,
        WeightSyncError,
    )
    from weightsync.model.box import Box
    from weightsync.model.layout import Layout
    from weightsync.model.manifest import Manifest, TensorSpec
    from weightsync.model.pause import PauseMode
    from weightsync.model.result import ReplicaResult, RoundResult
    from weightsync.model.version import Version
    from weightsync.tensors.shards import Shard, manifest_of, shard, shards_of
    from weightsync.trainer.adapters import Adapters
    from weightsync.trainer.lora_state import base_weights
    from weightsync.trainer.stream import Stream
    from weightsync.trainer.trainer import Trainer
    from weightsync.transports.broadcast.collective import Collective
    from weightsync.transports.broadcast.nccl import Nccl
    from weightsync.transports.cuda.ipc import CudaIpc
    from weightsync.transports.host.inproc import InProcess
    from weightsync.transports.host.shared_memory import SharedMemory
    from weightsync.transports.nixl.transport import Nixl
    from weightsync.transports.tcp.transport import Tcp

__version__ = "0.1.0"

_WHERE = {
    "Adapters": "weightsync.trainer.adapters",
    "Box": "weightsync.model.box",
    "Collective": "weightsync.transports.broadcast.collective",
    "CudaIpc": "weightsync.transports.cuda.ipc",
    "Engine": "weightsync.engine.engine",
    "EngineAdapter": "weightsync.engine.adapter",
    "InProcess": "weightsync.transports.host.inproc",
    "Layout": "weightsync.model.layout",
    "Manifest": "weightsync.model.manifest",
    "ModuleAdapter": "weightsync.engines.module",
    "Nccl": "weightsync.transports.broadcast.nccl",
    "Nixl": "weightsync.transports.nixl.transport",
    "PauseMode": "weightsync.model.pause",
    "Receiver": "weightsync.engine.receiver",
    "ReplicaResult": "weightsync.model.result",
    "RoundResult": "weightsync.model.result",
    "Shard": "weightsync.tensors.shards",
    "SharedMemory": "weightsync.transports.host.shared_memory",
    "Stream": "weightsync.trainer.stream",
    "Tcp": "weightsync.transports.tcp.transport",
    "TensorSpec": "weightsync.model.manifest",
    "Timeouts": "weightsync.config",
    "Trainer": "weightsync.trainer.trainer",
    "Version": "weightsync.model.version",
    "base_weights": "weightsync.trainer.lora_state",
    "manifest_of": "weightsync.tensors.shards",
    "shard": "weightsync.tensors.shards",
    "shards_of": "weightsync.tensors.shards",
}

__all__ = [
    "Aborted",
    "Adapters",
    "AuthenticationError",
    "Box",
    "BroadcastBroken",
    "Collective",
    "ConfigurationError",
    "CoordinatorUnreachable",
    "CudaIpc",
    "DeadlineExceeded",
    "Engine",
    "EngineAdapter",
    "InProcess",
    "Layout",
    "LayoutError",
    "LoadError",
    "Manifest",
    "ManifestMismatch",
    "MembershipError",
    "ModuleAdapter",
    "Nccl",
    "Nixl",
    "PauseMode",
    "PeerLost",
    "PlanMismatch",
    "ProtocolError",
    "Receiver",
    "ReplicaResult",
    "RoundFailed",
    "RoundResult",
    "Shard",
    "SharedMemory",
    "SharedMemoryTooSmall",
    "StaleSource",
    "Stream",
    "Tcp",
    "TensorSpec",
    "Timeouts",
    "Trainer",
    "TransportError",
    "TransportUnavailable",
    "VerificationError",
    "Version",
    "VersionError",
    "WeightSyncError",
    "__version__",
    "base_weights",
    "manifest_of",
    "shard",
    "shards_of",
]


if not TYPE_CHECKING:  # else a misspelt name would pass the type checker

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(_WHERE.get(name, "weightsync.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
