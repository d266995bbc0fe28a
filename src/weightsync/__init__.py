"""New weights from a trainer to serving engines: shard to shard, verified, never torn.

The names below are the public ones. They are loaded when first used, so that ``import weightsync`` stays quick and needs no
tensor library: the coordinator and the command line run without one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from weightsync import errors

if TYPE_CHECKING:
    from weightsync.config import Timeouts as Timeouts
    from weightsync.engine.adapter import EngineAdapter as EngineAdapter
    from weightsync.engine.engine import Engine as Engine
    from weightsync.engine.receiver import Receiver as Receiver
    from weightsync.engines.module import ModuleAdapter as ModuleAdapter
    from weightsync.errors import *  # noqa: F403 - every error is public
    from weightsync.model.box import Box as Box
    from weightsync.model.layout import Layout as Layout
    from weightsync.model.manifest import Manifest as Manifest
    from weightsync.model.manifest import TensorSpec as TensorSpec
    from weightsync.model.pause import PauseMode as PauseMode
    from weightsync.model.result import ReplicaResult as ReplicaResult
    from weightsync.model.result import RoundResult as RoundResult
    from weightsync.model.version import Version as Version
    from weightsync.tensors.shards import Shard as Shard
    from weightsync.tensors.shards import manifest_of as manifest_of
    from weightsync.tensors.shards import shard as shard
    from weightsync.tensors.shards import shards_of as shards_of
    from weightsync.trainer.adapters import Adapters as Adapters
    from weightsync.trainer.lora_state import base_weights as base_weights
    from weightsync.trainer.stream import Stream as Stream
    from weightsync.trainer.trainer import Trainer as Trainer
    from weightsync.transports.broadcast.collective import Collective as Collective
    from weightsync.transports.broadcast.nccl import Nccl as Nccl
    from weightsync.transports.cuda.ipc import CudaIpc as CudaIpc
    from weightsync.transports.host.inproc import InProcess as InProcess
    from weightsync.transports.host.shared_memory import SharedMemory as SharedMemory
    from weightsync.transports.nixl.transport import Nixl as Nixl
    from weightsync.transports.tcp.transport import Tcp as Tcp

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

__all__ = sorted(["__version__", *_WHERE, *errors.__all__])  # noqa: PLE0605


if not TYPE_CHECKING:  # else a misspelt name would pass the type checker

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(_WHERE.get(name, "weightsync.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
