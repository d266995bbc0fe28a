"""Messages of LoRA adapters. A version is prepared, staged, and registered when every rank of a replica has it. Nothing pauses."""

from __future__ import annotations

from typing import Annotated

import msgspec

from weightsync.model.lora import AdapterSpec
from weightsync.model.manifest import TensorSpec
from weightsync.model.version import Version
from weightsync.protocol.fields import Many, Message, Number
from weightsync.protocol.plan_messages import PlanSlice

MAX_KEPT = 1 << 20
"""The most versions of a name that may be kept."""

AdapterName = Annotated[str, msgspec.Meta(max_length=129)]


class HeldLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version of an adapter that an engine rank serves: ``version.run`` is the adapter's name."""

    version: Version
    spec: AdapterSpec


# Coordinator to engine.


class PrepareLora(Message, frozen=True):
    """Check that this rank can serve version ``number``, then connect and allocate. Answered by :class:`Prepared`.

    Fails before anything is read: other base weights, an unknown module, too large a rank, no free slot.
    """

    spec: AdapterSpec
    number: Number
    tensors: Annotated[tuple[TensorSpec, ...], Many]
    plan: PlanSlice


class StageLora(Message, frozen=True):
    """Read the version that was prepared, hand a copy to the engine, and digest it. Answered by :class:`Moved`. Nobody sees it."""

    name: AdapterName
    number: Number


class RegisterLora(Message, frozen=True):
    """All ranks of the replica hold ``version``, verified: requests may use it from now on. Answered by :class:`Done`."""

    version: Version


class DropLora(Message, frozen=True):
    """Serve these versions to no new request, and free each when no request uses it. Answered by :class:`Done`."""

    name: AdapterName
    numbers: Annotated[tuple[Number, ...], Many]


# Engine to coordinator.


class LorasRefused(Message, frozen=True):
    """This rank has dropped versions by itself, because its base changed and they are for that base only."""

    versions: Annotated[tuple[Version, ...], Many]


# Trainer to coordinator.


class RetireLora(Message, frozen=True):
    """Let every replica drop all its versions of an adapter except the newest ``keep``. Answered by :class:`Retired`."""

    name: AdapterName
    keep: Annotated[int, msgspec.Meta(ge=0, le=MAX_KEPT)]


class Retired(Message, frozen=True):
    """Versions that were dropped, each by at least one replica, and why replicas could not be told."""

    numbers: Annotated[tuple[Number, ...], Many]
    errors: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=4096)], ...], Many] = ()


LoraMessage = PrepareLora | StageLora | RegisterLora | DropLora | LorasRefused | RetireLora | Retired
