"""An engine rank's part in publications of LoRA adapters: prepare, stage, register and drop, beside rounds and without a pause."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch

from weightsync import failpoints
from weightsync.arrays import UInt64
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.fill.direct import HostDirect
from weightsync.engine.fill.filler import FillContext
from weightsync.engine.lora_memory import LoraMemory
from weightsync.engine.session import EngineSession
from weightsync.engine.session_front import SessionFront
from weightsync.errors import ConfigurationError, PlanMismatch, ProtocolError, VersionError, as_load_error, few
from weightsync.model import Box, Layout, Manifest, Version
from weightsync.model.lora import AdapterSpec, LoraSlots, adapter_label, lora_modules
from weightsync.protocol.lora_messages import DropLora, HeldLora, LorasRefused, PrepareLora, RegisterLora, StageLora
from weightsync.protocol.messages import Body, LetGo, Moved, Prepared
from weightsync.protocol.worker import IncomingCall
from weightsync.tensors.device_memory import digest_sums
from weightsync.tensors.shards import Shard
from weightsync.tensors.staging import Staging, check_free
from weightsync.transports.host.memory import available_bytes

_log = logging.getLogger(__name__)

_SHOWN, _MOST_REASON = 16, 500  # names; characters
_REMEMBERED = 1 << 16  # names; a Hello has room for so many


class _NoWeights(EngineAdapter):
    """What the session of a :class:`LoraRole` drives: it orders and aborts calls, and nothing is paused or written."""

    def manifest(self) -> Manifest:
        return Manifest(())


class _LoraStaging(HostDirect):
    """Fills memory for versions of one source's adapter, by at most one connection for each rank.

    It is ``own``, the engine's, for the first version, and other memory like it for later ones; ``None``: the same for all.
    """

    def __init__(self, context: FillContext, body: PrepareLora, manifest: Manifest, own: LoraMemory | None) -> None:
        layout = Layout.from_columns(manifest, body.plan.layout)
        if len(layout.regions) != 1:
            raise PlanMismatch(f"an adapter is staged in one piece, not in {len(layout.regions)}")
        self._own, self._memory = own, Staging(manifest, layout, buffers=1, free=available_bytes()) if own is None else None
        addresses = () if self._memory is None else self._memory.addresses
        if own is not None:  # the same rows elsewhere: pieces must fill these
            layout, addresses = own.layout, own.addresses
        super().__init__(replace(context, manifest=manifest), body.plan, layout, addresses)
        if self._memory is not None:
            self._owned.callback(self._memory.close)
        self.manifest = manifest

    def use(self, own: LoraMemory | None, deadline: Deadline) -> None:
        """Fill this memory next."""
        self._own = own
        if own is not None and own.addresses != self._addresses:
            moved = (np.array(own.addresses) - np.array(self._addresses))[self.layout.region]
            self._tables = [[tiles.moved(moved) for tiles in groups] for groups in self._tables]
            self._addresses = own.addresses
            self._readers.connect(self.plan.sources, self._tables, self.device, deadline, self._stopwatch)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What was received. The engine may keep what is its own."""
        own, self._own = self._own, None
        return dict(self._memory.tensors(0)) if self._memory is not None else own or {}

    def free(self) -> None:
        """Free the engine's memory, unless the engine has it."""
        self._own = None


class LoraRole(SessionFront):
    """Brings versions of adapters to one engine rank, on a separate thread.

    ``base`` returns the version that the rank holds. ``context`` makes readers as rounds do. ``report`` tells the coordinator.
    """

    turn_seconds = math.inf  # a call may wait for one before it as long as it has time: these hang no round
    _points = "engine.lora"

    def __init__(
        self,
        adapter: EngineAdapter,
        member: str,
        base: Callable[[], Version | None],
        context: FillContext,
        report: Callable[[Body], None],
    ) -> None:
        super().__init__(EngineSession(_NoWeights(), member, self._abort_work))
        self._adapter, self._base, self._report = adapter, base, report
        # Read from the publisher's memory, not from a store, say, which this engine would open with its own credentials.
        readers = [transport for transport in context.transports if "host" in transport.traits.reads]
        self._context = replace(context, engine=self.session, transports=readers, progress=lambda nbytes: None)
        self._handlers = {
            PrepareLora: self._prepare, StageLora: self._stage, RegisterLora: self._register, DropLora: self._drop,
            LetGo: self._let_go,
        }  # fmt: skip
        self._staging: _LoraStaging | None = None
        self._manifest = Manifest(())
        """Of the last adapter that was prepared."""
        self._prepared: tuple[AdapterSpec, int] | None = None
        self._staged: tuple[str, AdapterSpec] | None = None
        self._served: dict[str, HeldLora] = {}
        self._taken: dict[str, int] = {}
        self._visible = threading.Lock()
        """Held while versions become visible or are refused: the base does not change in between."""

    @property
    def slots(self) -> LoraSlots | None:
        """What adapters the engine takes."""
        return self._adapter.lora_slots()

    @property
    def served(self) -> tuple[HeldLora, ...]:
        """Versions that requests may use."""
        return tuple(self._served.copy().values())

    @property
    def taken(self) -> dict[str, int]:
        """The highest number by name that requests could ever use here; of very many names, of those that were taken last."""
        return self._taken.copy()

    def receive(self, body: Body, update: int = 0) -> IncomingCall:
        """See :meth:`SessionFront.receive`."""
        return replace(super().receive(body, update), beside=True)

    def base_changed(self, base: Version | None) -> None:
        """The engine is about to serve ``base``: refuse adapters that are for other weights only. ``None``: unknown ones."""
        with self._visible:
            refused = {
                label: held.version
                for label, held in self._served.items()
                if held.spec.on_base_update == "refuse" and (base is None or held.spec.base != base)
            }
            if refused:
                self._report(LorasRefused(tuple(refused.values())))
            with ExitStack() as dropping:  # each of them, whatever another one raises
                for label in refused:
                    dropping.callback(self._drop_here, label)

    def _prepare(self, body: PrepareLora, deadline: Deadline) -> Prepared:
        spec, slots = body.spec, self.slots
        label = adapter_label(spec.name, body.number)
        self._unstage()
        self._check_base(label, spec)
        if slots is None:
            raise ConfigurationError(f"the {self._adapter.name} adapter takes no LoRA adapters")
        manifest = self._manifest
        if body.tensors != manifest.tensors:  # an adapter of experts has 18,000, of which nothing is asked twice
            manifest = Manifest(body.tensors)
            lora_modules(manifest)
            self._manifest = manifest
        if spec.config.rank > slots.max_rank:
            raise ConfigurationError(
                f"{label} has rank {spec.config.rank}, and this engine allows {slots.max_rank}: raise its max_lora_rank"
            )
        self._adapter.check_lora(spec, manifest)
        used = sorted(self._adapter.loras())
        if label in used:
            raise VersionError(f"this engine holds {label} already")
        if len(used) >= slots.slots:
            owner = spec.name.partition("/")[0] + "/"
            own = [name for name in used if name.startswith(owner)]
            others = f"{len(used) - len(own)} by other owners" + (f", and by {few(own, _SHOWN)}" if own else "")
            _log.warning("%s finds no free slot: %s are in use", label, ", ".join(used))
            raise ConfigurationError(  # that others publish here too is all that a tenant learns of them
                f"all {slots.slots} slots for adapters are in use ({others}): retire versions with "
                "Adapters.retire(name, keep=...), or give the engine more slots. A retired version's slot is free when the last "
                "request that uses it has ended"
            )
        staging = self._staging
        if staging is None or staging.plan.digest != body.plan.digest or staging.plan.sources != body.plan.sources:
            self._release()
            check_free(manifest.nbytes, available_bytes())
            staging = self._staging = _LoraStaging(self._context, body, manifest, self._memory(label))
            with OnFailure(self._release):
                self.session.check_abort()  # an abort before the filler was in its place did not reach it
                staging.prepare(deadline)
        else:
            with OnFailure(self._release):
                staging.use(self._memory(label), deadline)
        self._prepared = spec, body.number
        failpoints.reached("engine.lora.prepared")
        return Prepared(digest=staging.digest, transports=staging.transports)

    def _memory(self, label: str) -> LoraMemory | None:
        with as_load_error(f"the engine has no memory for {label}"):
            return self._adapter.lora_memory()

    def _stage(self, body: StageLora, deadline: Deadline) -> Moved:
        prepared, staging = self._prepared, self._staging
        if staging is None or prepared is None or (prepared[0].name, prepared[1]) != (body.name, body.number):
            raise ProtocolError(f"{self.session.member} is not prepared for {adapter_label(body.name, body.number)}")
        self._prepared, spec = None, prepared[0]
        label = adapter_label(body.name, body.number)
        with OnFailure(self._release):  # its connections may be beyond use
            filled = staging.run(body.number, deadline)
        failpoints.reached("engine.lora.received")
        self._staged = label, spec
        with OnFailure(self._unstage):
            with as_load_error(f"the engine could not take {label}"):
                copies = self._adapter.stage_lora(label, spec, staging.tensors())
            reason = "the engine does not show its copies" if copies is None else copies if isinstance(copies, str) else ""
            digests = _digests(staging.manifest, copies, deadline) if isinstance(copies, Mapping) else filled.digests
            self.session.check_abort()
        failpoints.reached("engine.lora.staged")
        return Moved(
            nbytes=staging.nbytes, digests=digests.astype("<u8").tobytes(), receive_seconds=filled.receive_seconds,
            load_seconds=0.0, digest_seconds=0.0, verified="received" if reason else "installed", reason=reason[:_MOST_REASON],
        )  # fmt: skip

    def _register(self, body: RegisterLora, deadline: Deadline) -> None:
        label = adapter_label(body.version.run, body.version.number)
        staged = self._staged
        if staged is None or staged[0] != label:
            raise ProtocolError(f"{self.session.member} has not staged {label}")
        failpoints.reached("engine.lora.register")
        with self._visible:
            self._check_base(label, staged[1])
            self.session.check_abort()
            name = body.version.run
            self._taken[name] = max(self._taken.pop(name, -1), body.version.number)
            if len(self._taken) > _REMEMBERED:
                del self._taken[next(iter(self._taken))]
            with OnFailure(self._unstage):
                with as_load_error(f"the engine could not take {label}"):
                    self._adapter.register_lora(body.version)
                failpoints.reached("engine.lora.registered")
                self.session.check_abort()
            self._served[label] = HeldLora(body.version, staged[1])
            self._staged = None

    def _drop(self, body: DropLora, deadline: Deadline) -> None:
        failpoints.reached("engine.lora.drop")
        if self._prepared is not None and self._prepared[0].name == body.name and self._prepared[1] in body.numbers:
            self._prepared = None  # its round failed before this rank staged: nothing is about to be read
        with self._visible, ExitStack() as dropping:  # each of them, whatever another one raises
            for label in (adapter_label(body.name, number) for number in body.numbers):
                if self._staged is not None and self._staged[0] == label:
                    self._staged = None
                dropping.enter_context(as_load_error(f"the engine could not drop {label}"))
                dropping.callback(self._drop_here, label)

    def _drop_here(self, label: str) -> None:
        self._adapter.drop_lora(label)
        self._served.pop(label, None)  # and not before: what the engine may serve is reported when this rank reconnects

    def _check_base(self, label: str, spec: AdapterSpec) -> None:
        """Raise VersionError unless the engine holds the base of the adapter."""
        base = self._base()
        if base != spec.base:
            raise VersionError(f"{label} is for {_described(spec.base)}, and this engine holds {_described(base)}")

    def _unstage(self) -> None:
        """Free what an earlier attempt staged and did not register."""
        staged, self._staged, self._prepared = self._staged, None, None
        if self._staging is not None:
            self._staging.free()
        if staged is not None:
            self._adapter.drop_lora(staged[0])

    def _abort_work(self) -> None:
        staging = self._staging
        if staging is not None:
            staging.abort()

    def close(self, timeout: float = 5.0) -> None:
        """Abort what runs and free the staging memory. The engine keeps the versions that it serves."""
        self.session.close(timeout, self._release)

    def _let_go(self, body: LetGo, deadline: Deadline) -> None:
        """Disconnect from the memory of the last version, unless another one is about to be read."""
        if self._prepared is None:
            self._release()

    def _release(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()


def _digests(manifest: Manifest, copies: Mapping[str, torch.Tensor], deadline: Deadline) -> UInt64:
    """Digest what the engine holds now, in the order of the plan's rows."""
    shards = [Shard(spec.name, spec.shape, Box.whole(spec.shape), copies[spec.name]) for spec in manifest]
    return digest_sums(manifest, shards, deadline)[[spec.size > 0 for spec in manifest]]


def _described(base: Version | None) -> str:
    return "weights that weightsync did not deliver" if base is None else f"version {base} (digest {base.digest})"
