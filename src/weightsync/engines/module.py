"""Adapter for a plain :class:`torch.nn.Module` as a rollout engine: the smallest complete adapter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.in_step import InStep
from weightsync.engines.module_loras import ModuleLoras
from weightsync.errors import ConfigurationError, DeadlineExceeded, VersionError
from weightsync.model import Manifest, PauseMode, Version
from weightsync.model.lora import LoraSlots, adapter_label
from weightsync.tensors.shard_loader import ShardLoader
from weightsync.tensors.shards import FollowedShards, Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule

_VOTE = object()


@dataclass
class _Ballot:
    """What one of several ranks holds until a vote has ended."""

    adapter: str | None = None
    able: bool = False
    version: Version | None = None
    using: ExitStack = field(default_factory=ExitStack)


class ModuleAdapter(EngineAdapter):
    """Adapter that writes the parameters of ``module`` (plain or DTensor) in place, between two uses of the module.

    Run the module ``with adapter.in_use() as version:``. A round waits until that context ends, and the context cannot be entered
    during a round. A pause reaches the ranks of a replica at different moments. So ranks that use the module in step enter
    together: one that is paused holds back the others, which would otherwise wait for it inside.

    Args:
        module: The module.
        include_buffers: Whether persistent buffers are updated too.
        process_group: The ranks that use the module in step; all call :meth:`in_use` equally often. Defaults to the ranks of the
            mesh of the module's DTensors.
        adapter_slots: Versions of LoRA adapters that the module holds at most; see :class:`weightsync.Adapters`. What
            ``torch.compile`` compiled before is compiled again, because it would not compute with them.
        max_lora_rank: Their largest rank.
    """

    name = "module"
    pauses_twice = True
    follows = True
    loads_some = True

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        include_buffers: bool = False,
        process_group: ProcessGroup | None = None,
        adapter_slots: int = 0,
        max_lora_rank: int = 64,
    ) -> None:
        self.module = module
        self.version: Version | None = None
        self._followed = FollowedShards(module, include_buffers=include_buffers)
        self.lora_versions = self._loras = ModuleLoras(module, LoraSlots(adapter_slots, max_lora_rank)) if adapter_slots else None
        self._fsdp = _fsdp_modules(module)
        ranks = _ranks_of(module) if process_group is None else torch.distributed.get_process_group_ranks(process_group)
        self._in_step = InStep(ranks) if len(ranks) > 1 else None
        self._entering = threading.RLock()
        self._lock = threading.RLock()
        """Entered itself, not as :attr:`_changed`: an exception of a signal handler in between would leave it held."""
        self._changed = threading.Condition(self._lock)
        self._ballot = _Ballot()
        self._paused = False
        self._begun = False  # from begin() to resume(): nothing computes with the module
        self._guessed = False  # the last look returned what was found before
        self._users: dict[object, None] = {}  # and _VOTE until a vote of this rank has ended
        self._loader: ShardLoader | None = None
        self._loader_of: Sequence[Shard] = ()
        self._moved = True  # parameters may have moved; the first load after a pause checks it, once for all buckets

    @contextmanager
    def in_use(self, timeout: float = 60.0, *, adapter: str | None = None) -> Iterator[Version | None]:
        """Block rounds inside the context, which yields the module's version (``None`` before the first). One user at a time.

        With ``adapter`` the module computes with that LoRA adapter, and its version is yielded: with ``alice/math`` the newest
        that is served when the context begins, with ``alice/math@2`` that one. Publications of adapters do not wait for it.

        Raises:
            VersionError: The adapter is not served here, or not by all ranks.
            DeadlineExceeded: The module was paused or in use for ``timeout`` seconds, or the other ranks did not enter.
            PeerLost: Another rank has left.
            ConfigurationError: This is one of several ranks, and it is not known which enter together.
        """
        me = object()
        if adapter is not None and self._loras is None:
            raise ConfigurationError("this module holds no LoRA adapters: give ModuleAdapter(module, adapter_slots=...)")
        try:  # around it all: a signal handler may raise right after the module was taken
            with ExitStack() as using:
                if self._in_step is not None or self.replica_ranks > 1:
                    version = self._enter_in_step(me, timeout, adapter, using)
                else:
                    with self._lock:
                        self._wait_until_free(timeout)
                        self._users[me] = None
                    version = self.version
                    if adapter is not None and self._loras is not None:
                        version = using.enter_context(self._loras.using(adapter))
                yield version
        finally:
            self._users.pop(me, None)
            self._notify()

    def _wait_until_free(self, timeout: float) -> None:
        if not self._changed.wait_for(lambda: not self._paused and not self._users, timeout):
            raise DeadlineExceeded(f"the module was paused for an update, or in use, for more than {timeout:g} s")

    def _enter_in_step(self, me: object, timeout: float, adapter: str | None, using: ExitStack) -> Version | None:
        """Enter when all ranks do, with the newest version of ``adapter`` that all have. Return the version.

        While ranks wait for one another, none is in use: a pause that comes then goes on. When all are here, each says whether
        it is free, and from then on a pause waits for the result, which takes no longer than the message.
        """
        others, deadline = self._in_step, Deadline(timeout)
        if others is None or self.replica_ranks not in (1, len(others.ranks)):
            raise ConfigurationError(
                f"this module is one of the {self.replica_ranks} ranks of a replica. A pause reaches them at different moments, "
                "and ranks that wait for one another inside in_use() would wait for ever: give ModuleAdapter(module, "
                "process_group=...) the group of all ranks of the replica, so that they enter together"
            )
        try:
            if not self._entering.acquire(timeout=timeout):
                raise DeadlineExceeded(f"another thread waited to use the module for more than {timeout:g} s")
            agreed = False
            while not agreed:
                if not others.voting:
                    with self._lock:
                        self._end_vote()  # of a call that was interrupted
                        self._wait_until_free(deadline.remaining("waiting for the module"))
                    self._ballot = _Ballot(adapter)
                    key = 0 if adapter is None else int.from_bytes(sha256(adapter.encode()).digest()[:7])
                    number, least, most = others.meet(deadline, self._loras.newest(adapter) if self._loras else 0, key, -key)
                    with self._lock:
                        if not self._paused and not self._users:
                            self._users[_VOTE] = None
                    self._ballot.able = least == -most and self._has_chosen(adapter, number)
                ballot = self._ballot
                agreed, able = others.vote(_VOTE in self._users, deadline, ballot.able)
                if agreed and able and ballot.adapter == adapter:
                    using.callback(ballot.using.close)
                    self._users[me] = None
                    self._users.pop(_VOTE, None)
                else:
                    self._end_vote()
                self._notify()
                if not able or ballot.adapter != adapter:
                    raise VersionError(f"not all ranks of this replica serve {adapter}, or they use different adapters")
            return self.version if adapter is None else ballot.version
        finally:
            with suppress(RuntimeError):  # another thread's
                self._entering.release()

    def _has_chosen(self, adapter: str | None, number: int) -> bool:
        """Whether this rank can compute with the version that all have. If it is free, it holds that from then on."""
        if adapter is not None and self._loras is not None and _VOTE in self._users:
            try:
                label = adapter_label(adapter.partition("@")[0], number)
                self._ballot.version = self._ballot.using.enter_context(self._loras.using(label))
            except VersionError:
                return False
        return True

    def _end_vote(self) -> None:
        self._ballot.using.close()
        self._users.pop(_VOTE, None)

    def manifest(self) -> Manifest:
        """Return the manifest of the module's parameters, and of its persistent buffers if included."""
        return self._look()[0]

    def shards(self) -> Sequence[Shard]:
        """Return shards over the parameters, for direct delivery; while the module is in use, those that were found last."""
        return self._look()[1]

    @property
    def outdated(self) -> bool:
        """Whether parameters have moved while the module is in use."""
        return self._guessed and not self._followed.unchanged

    def _look(self) -> tuple[Manifest, Sequence[Shard]]:
        """Look where the parameters are, unless a forward pass may run: hooks of state dicts change the module.

        FSDP2's hook frees gathered parameters. A forward pass would read freed memory, and one rank that has freed them gathers
        again while the others do not. So modules with FSDP2 are looked at only between :meth:`begin` and :meth:`resume`.
        """
        self._guessed = False
        if self._begun:
            return self._followed.now_quickly()
        me = object()
        with self._lock:
            if self._users or self._fsdp:
                self._guessed = True
                return self._followed.last
            self._users[me] = None
        try:
            return self._followed.now()
        finally:
            self._users.pop(me, None)
            self._notify()

    def _notify(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Block new uses until :meth:`resume`, and wait for the current one to end. All modes have the same effect."""
        with self._lock:
            self._paused = True
            if not self._changed.wait_for(lambda: not self._users, timeout):
                raise DeadlineExceeded(f"the module was in use for more than {timeout:g} s: in_use() did not end")
            self.version = None

    def begin(self) -> None:
        """Look for the parameters again. FSDP2 frees what it gathered for a forward pass, or the next one would compute with it."""
        for module in self._fsdp:
            module.reshard()
        self._begun = self._moved = True

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's part of each whole tensor into the parameter of the same name."""
        if self._moved or self._loader is None:
            shards = self.shards()
            if self._loader is None or shards is not self._loader_of:
                self._loader, self._loader_of = ShardLoader(shards), shards
            self._moved = False
        self._loader.load(tensors)

    def finish(self, version: Version) -> None:
        """Store the version."""
        self.version = version

    def resume(self) -> None:
        """Allow the module to be used again."""
        with self._lock:
            self._paused = self._begun = False
            self._changed.notify_all()


def _fsdp_modules(module: torch.nn.Module) -> list[FSDPModule]:
    """Return the modules within ``module`` that FSDP2 has sharded."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)  # it sharded nothing if it is not imported
    return [] if fsdp is None else [child for child in module.modules() if isinstance(child, fsdp)]


def _ranks_of(module: torch.nn.Module) -> list[int]:
    """Return the ranks of the largest mesh of the module's DTensors."""
    meshes = [mesh for parameter in module.parameters() if (mesh := getattr(parameter, "device_mesh", None)) is not None]
    return max((mesh.mesh.flatten().tolist() for mesh in meshes), key=len, default=[])
