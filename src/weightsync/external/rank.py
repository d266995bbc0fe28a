"""One engine rank of a disaggregated update: its groups, its adapters, and the digests of what it received."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.adapter_calls import AdapterCalls
from weightsync.engine.loading import load_all
from weightsync.errors import (
    DeadlineExceeded,
    LayoutError,
    LoadError,
    MembershipError,
    PeerLost,
    ProtocolError,
    WeightSyncError,
    to_wire,
)
from weightsync.external.checks import Incoming, Packing, join_manifests
from weightsync.external.orders import (
    Answer,
    Describe,
    Described,
    Digested,
    Done,
    Failed,
    Finish,
    Join,
    Leave,
    Order,
    Pause,
    Quarantine,
    Receive,
    Resume,
    Verify,
    decode_order,
    encode,
)
from weightsync.model import Box, Manifest, PauseMode, Version
from weightsync.tensors.digest import digest_rows
from weightsync.tensors.memory import layout_in_place
from weightsync.tensors.shards import Shard, torch_dtype
from weightsync.transports.broadcast.process_groups import Group, init_custom_process_group

__all__ = ["DisaggregatedRank"]

_log = logging.getLogger(__name__)
_ALIGNMENT = 512


class DisaggregatedRank:
    """Obeys the orders of the server's front on behalf of one engine rank.

    Whoever carries orders to this process hands them to :meth:`handle`, several at once from several threads if they like: calls
    of an adapter come one at a time, as its contract says, while several groups may receive side by side. ``draft`` takes the
    tensors whose names begin with ``draft_prefix``. ``reset_graphs`` is called when an update is finalized, before caches are
    dropped: what was captured with the old weights (CUDA graphs, compiled code) goes there. ``device`` is where NCCL receives.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        draft: EngineAdapter | None = None,
        *,
        rank: int = 0,
        draft_prefix: str = "mtp.",
        packing: Packing = "elements",
        device: torch.device | str = "cpu",
        reset_graphs: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self._draft, self._prefix = draft, draft_prefix
        self._adapters = (adapter,) if draft is None else (adapter, draft)
        self._calls = tuple(AdapterCalls(one, f"rank {rank} of updates from outside", self._taken) for one in self._adapters)
        self._packing = packing
        self._device = torch.device(device)
        self._reset_graphs = reset_graphs
        self.manifest: Manifest = join_manifests(adapter.manifest(), None if draft is None else draft.manifest(), draft_prefix)
        self._groups: dict[str, Group] = {}
        self._joining: set[str] = set()
        self._table = threading.Lock()
        self._state: Literal["serving", "quarantined", "paused", "loading", "verified", "finished"] = "serving"
        self._update = 0
        self._received = np.zeros(len(self.manifest), np.uint64)
        self._known = np.zeros(len(self.manifest), np.bool_)

    def handle(self, message: bytes) -> bytes:
        """Obey one encoded order; never raises: what went wrong is in the answer."""
        try:
            answer = self._obey(decode_order(message))
        except WeightSyncError as error:
            answer = Failed(*to_wire(error))
        except Exception as error:  # noqa: BLE001 - it crosses to the front, and is logged here
            _log.exception("rank %d of a disaggregated update failed", self.rank)
            answer = Failed(*to_wire(error))
        failpoints.reached("rank.answer")
        return encode(answer)

    @contextmanager
    def _engine(self) -> Iterator[None]:
        """This order's turn with the engine, which others may drive too."""
        with ExitStack() as turns:
            for calls in self._calls:
                turns.enter_context(calls.turn)
            yield

    def _taken(self) -> None:
        self._state = "quarantined"  # until the next pause: somebody else writes the engine now

    def close(self) -> None:
        """Leave all groups. The engine stays as it is."""
        with self._table:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.close()

    def _obey(self, order: Order) -> Answer:
        match order:
            case Describe():
                nccl = self._device.type == "cuda" and torch.distributed.is_nccl_available()
                return Described(self.manifest.tensors, ("gloo", "nccl") if nccl else ("gloo",))
            case Join():
                self._join(order)
            case Leave():
                failpoints.reached("rank.leave")
                with self._table:
                    group = self._groups.pop(order.name, None)
                if group is not None:
                    group.close()
            case Receive():
                return Done(self._receive(order))
            case Pause():
                self._pause(order)
            case Quarantine():
                self._quarantine(order)
            case Verify():
                failpoints.reached("rank.verify")
                with self._engine():
                    self._check(order.update, "paused", "verified")
                    return self._verify()
            case Finish():
                failpoints.reached("rank.finish")
                with self._engine():
                    self._check(order.update, "verified")
                    self._finish(order.version)
            case Resume():
                failpoints.reached("rank.resume")
                with self._engine():
                    self._check(order.update, "finished")
                    self._resume()
                failpoints.reached("rank.resumed")
        return Done()

    def _join(self, order: Join) -> None:
        failpoints.reached("rank.join")
        with self._table:
            if order.name in self._groups or order.name in self._joining:
                raise MembershipError(f"group {order.name!r} is already initialized")
            self._joining.add(order.name)
        try:
            group = self._meet(order)
            with self._table:
                self._groups[order.name] = group
        finally:
            with self._table:
                self._joining.discard(order.name)

    def _meet(self, order: Join) -> Group:
        """Join the group. One error for every failure at the other end: whoever names an address learns nothing about it."""
        try:
            return init_custom_process_group(
                cast(Any, order.backend),
                order.rank_offset + self.rank,
                order.world_size,
                order.name,
                Deadline(order.timeout),
                address=order.address,
                port=order.port,
                device=self._device if order.backend == "nccl" else None,
            )
        except (DeadlineExceeded, PeerLost) as error:
            _log.warning("rank %d could not join group %r at %s:%d: %s", self.rank, order.name, order.address, order.port, error)
            raise PeerLost(
                f"group {order.name!r} did not come about within {order.timeout:g} s; the log of this engine rank says why"
            ) from None

    def _pause(self, order: Pause) -> None:
        failpoints.reached("rank.pause")
        with self._engine():
            self._update = order.update  # even if pausing fails
            self._halt(order.mode, order.timeout)
            for calls in self._calls:
                calls.begin()
                calls.wake_weights()
            self._known[:] = False
            self._state = "paused"
        failpoints.reached("rank.paused")

    def _quarantine(self, order: Quarantine) -> None:
        failpoints.reached("rank.quarantine")
        with self._engine():
            if order.update == self._update:  # else one that was begun meanwhile has paused the engine, and is not spoiled
                self._halt("abort", order.timeout)

    def _halt(self, mode: PauseMode, timeout: float) -> None:
        """Leave the serving state first, then pause what is not paused."""
        self._state = "quarantined"
        for calls in self._calls:
            calls.pause(mode, timeout)

    def _check(self, update: int, *states: str) -> None:
        """Raise :class:`~weightsync.errors.ProtocolError` unless this rank is in one of ``states`` for this very ``update``."""
        if self._state not in states:
            raise ProtocolError(f"this engine rank is {self._state}, and must be {' or '.join(states)} for this order")
        if self._update != update:
            raise ProtocolError("this order belongs to an update that ended; another one was begun meanwhile")

    def _receive(self, order: Receive) -> int:
        failpoints.reached("rank.receive")
        with self._table:
            group = self._groups.get(order.group)
        if group is None or group.closed:
            raise MembershipError(f"group {order.group!r} is not initialized, or broke")
        self._check(order.update, "paused", "loading")  # that of another group's bucket, which ends before this one is loaded
        deadline = Deadline(order.timeout)
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        memory, tensors = _stage(order, device, self._packing)
        group.broadcast(memory, deadline)
        failpoints.reached("rank.arrived")
        if order.flattened:
            tensors = _unflatten(memory[0], order.tensors) if memory else []
        arrived = [  # under the names that the loaders know: a sender may use the aliases
            Shard(self.manifest[one.index].name, tensor.shape, Box.whole(tuple(tensor.shape)), tensor)
            for one, tensor in zip(order.tensors, tensors, strict=True)
        ]
        digests = self._digests(arrived)
        failpoints.reached("rank.load")
        with self._engine():
            self._check_current(order, group)
            self._state = "loading"
            try:
                self._load([(named.name, named.tensor) for named in arrived])
            except BaseException:
                self._state = "quarantined"  # what the loader took is not known
                raise
            self._state = "paused"
            for one in order.tensors:
                self._received[one.index] = digests[one.index]
                self._known[one.index] = True
        return sum(one.nbytes for one in order.tensors)

    def _check_current(self, order: Receive, group: Group) -> None:
        """Raise unless a bucket that has arrived may still be loaded. Called under the lock that loads."""
        self._check(order.update, "paused")
        if group.closed:
            raise PeerLost(f"group {order.group!r} was destroyed while a bucket of it arrived; the bucket was not loaded")

    def _load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        own = [item for item in tensors if self._draft is None or not item[0].startswith(self._prefix)]
        rest = [item for item in tensors if self._draft is not None and item[0].startswith(self._prefix)]
        for adapter, calls, share in zip(self._adapters, self._calls, (own, rest), strict=False):
            if share:
                load_all(calls.load, adapter.name, share)

    def _digests(self, shards: Sequence[Shard]) -> npt.NDArray[np.uint64]:
        """Of whole tensors in memory, ``uint64[tensors of the manifest]``; zero for those that are not there, or empty."""
        found = np.zeros(len(self.manifest), np.uint64)
        layout, addresses = layout_in_place(self.manifest, shards, block_bytes=None)
        if not len(layout):
            return found
        device = shards[0].tensor.device
        if device.type == "cuda":
            from weightsync.tensors.cuda.digest import LayoutDigest

            found[layout.tensor] = LayoutDigest(self.manifest, layout, addresses, device).digests()
            return found
        digests = np.zeros(len(layout), np.uint64)
        digest_rows(self.manifest, layout, addresses, 0, len(layout), digests)
        found[layout.tensor] = digests
        return found

    # Called under the lock, for the update that runs.

    def _verify(self) -> Digested:
        """Digest the parameters themselves where they are whole, plain copies; else what the loader was given must do."""
        self._state = "verified"
        digests, installed = np.where(self._known, self._received, 0).astype("<u8"), False
        shards: list[Shard] = []
        for calls in self._calls:
            shards += calls.shards() or ()
        names = {shard.name for shard in shards}
        whole = all(shard.box == Box.whole(shard.shape) for shard in shards)
        if shards and whole and len({shard.tensor.device for shard in shards}) == 1 and len(names) == len(shards):
            sent = {spec.name for spec, known in zip(self.manifest, self._known, strict=True) if known and spec.size}
            if sent <= names:
                try:
                    digests, installed = self._digests(shards).astype("<u8"), True
                except LayoutError:  # not memory that can be digested in place
                    installed = False
        return Digested(digests.tobytes(), installed)

    def _finish(self, version: Version) -> None:
        for calls in self._calls:
            calls.finish(version)
        self._reset_graphs()
        for calls in self._calls:
            calls.wake_cache()
        failpoints.reached("rank.flush")
        for adapter, calls in zip(self._adapters, self._calls, strict=True):
            if not calls.flush():
                raise LoadError(f"the {adapter.name} engine refused to drop caches made with the old weights")
        self._state = "finished"

    def _resume(self) -> None:
        for calls in self._calls:
            calls.resume()
        self._state = "serving"


def _stage(order: Receive, device: torch.device, packing: Packing) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Memory for the collectives, in their order, and the tensors in it, where each has a collective of its own."""
    if order.flattened:
        total = sum(one.nbytes for one in order.tensors)
        return ([torch.empty(total, dtype=torch.uint8, device=device)] if order.tensors else []), []
    places, end = [], 0
    for one in order.tensors:
        places.append(end)
        end += -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    tensors = [
        memory[place : place + one.nbytes].view(torch_dtype(one.dtype)).view(one.shape)
        for one, place in zip(order.tensors, places, strict=True)
    ]
    return tensors, tensors


def _unflatten(flat: torch.Tensor, tensors: Sequence[Incoming]) -> list[torch.Tensor]:
    """Views of a flattened bucket; a copy where mixed dtypes left a tensor at an odd address."""
    found, place = [], 0
    for one in tensors:
        dtype = torch_dtype(one.dtype)
        part = flat[place : place + one.nbytes]
        if place % dtype.itemsize:
            part = part.clone()
        found.append(part.view(dtype).view(one.shape))
        place += one.nbytes
    return found
