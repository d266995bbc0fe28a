"""New weights from a trainer to serving engines: shard to shard, verified, never torn.

The names below are the public ones. They are loaded when first used, so that ``import weightsync`` stays quick and needs no
tensor library: the coordinator and the command line run without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync import errors
from weightsync.first_use import on_first_use

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
    from weightsync.trainer.adapters import base_weights as base_weights
    from weightsync.trainer.stream import Stream as Stream
    from weightsync.trainer.trainer import Trainer as Trainer
    from weightsync.transports.broadcast.collective import Collective as Collective
    from weightsync.transports.broadcast.nccl import Nccl as Nccl
    from weightsync.transports.cuda.ipc import CudaIpc as CudaIpc
    from weightsync.transports.host.inproc import InProcess as InProcess
    from weightsync.transports.host.shared_memory import SharedMemory as SharedMemory
    from weightsync.transports.tcp.transport import Tcp as Tcp
    from weightsync_nixl import Nixl as Nixl

__version__ = "0.1.0"

_HOLDS = {
    "config": ("Timeouts",),
    "engine.adapter": ("EngineAdapter",),
    "engine.engine": ("Engine",),
    "engine.receiver": ("Receiver",),
    "engines.module": ("ModuleAdapter",),
    "model.box": ("Box",),
    "model.layout": ("Layout",),
    "model.manifest": ("Manifest", "TensorSpec"),
    "model.pause": ("PauseMode",),
    "model.result": ("ReplicaResult", "RoundResult"),
    "model.version": ("Version",),
    "tensors.shards": ("Shard", "manifest_of", "shard", "shards_of"),
    "trainer.adapters": ("Adapters", "base_weights"),
    "trainer.stream": ("Stream",),
    "trainer.trainer": ("Trainer",),
    "transports.broadcast.collective": ("Collective",),
    "transports.broadcast.nccl": ("Nccl",),
    "transports.cuda.ipc": ("CudaIpc",),
    "transports.host.inproc": ("InProcess",),
    "transports.host.shared_memory": ("SharedMemory",),
    "transports.tcp.transport": ("Tcp",),
    "errors": errors.__all__,
}
"""Modules, and the public names that they hold."""

_WHERE = {name: module for module, names in _HOLDS.items() for name in names}

__all__ = sorted(["__version__", *_WHERE])  # noqa: PLE0605


if not TYPE_CHECKING:  # else a misspelt name would pass the type checker
    __getattr__ = on_first_use(__name__, {**_WHERE, "Nixl": "transports.nixl"})  # an old name, of a package beside this one


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
