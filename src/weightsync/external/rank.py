"""One engine rank of a disaggregated update: its groups, its adapters, and the digests of what it received."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.read_back import ReadBack
from weightsync.engine.session import EngineSession, Ticket
from weightsync.errors import (
    DeadlineExceeded,
    MembershipError,
    PeerLost,
    WeightSyncError,
    to_wire,
)
from weightsync.external.checks import Incoming, Packing
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
    Step,
    Verify,
    decode_order,
    encode,
)
from weightsync.model import Box, Manifest, PauseMode
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

    Keeps the groups and the digests of what was received. The engine's state is its
    :class:`~weightsync.engine.session.EngineSession`'s.
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
        self.session = EngineSession(adapter, f"rank {rank} of updates from outside", draft=draft, draft_prefix=draft_prefix)
        self.manifest: Manifest = self.session.manifest
        self._packing = packing
        self._device = torch.device(device)
        self._reset_graphs = reset_graphs
        self._groups: dict[str, Group] = {}
        self._joining: set[str] = set()
        self._table = threading.Lock()
        self._received = np.zeros(len(self.manifest), np.uint64)
        self._known = np.zeros(len(self.manifest), np.bool_)

    def handle(self, message: bytes) -> bytes:
        """Obey one encoded order; never raises: what went wrong is in the answer."""
        try:
            answer = self.obey(decode_order(message))
        except WeightSyncError as error:
            answer = Failed(*to_wire(error))
        except Exception as error:  # noqa: BLE001 - it crosses to the front, and is logged here
            _log.exception("rank %d of a disaggregated update failed", self.rank)
            answer = Failed(*to_wire(error))
        failpoints.reached("rank.answer")
        return encode(answer)

    def close(self) -> None:
        """Leave all groups. The engine stays as it is."""
        with self._table:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.close()

    def obey(self, order: Order) -> Answer:
        """Obey one order. Raises what went wrong."""
        match order:
            case Describe():
                nccl = self._device.type == "cuda" and torch.distributed.is_nccl_available()
                return Described(self.manifest.tensors, ("gloo", "nccl") if nccl else ("gloo",))
            case Join():
                self._join(order)
                return Done()
            case Leave():
                failpoints.reached("rank.leave")
                with self._table:
                    group = self._groups.pop(order.name, None)
                if group is not None:
                    group.close()
                return Done()
        call = self.session.receive(type(order).__name__, order.update, aborts=isinstance(order, Quarantine))
        return self._update(order, call, Deadline(order.timeout))

    def _update(self, order: Step, call: Ticket, deadline: Deadline) -> Answer:
        match order:
            case Pause():
                failpoints.reached("rank.pause")
                with self.session.turn(call, deadline):
                    self._pause(order.mode, deadline)
                failpoints.reached("rank.paused")
            case Receive():
                return Done(self._receive(order, call, deadline))
            case Verify():
                failpoints.reached("rank.verify")
                with self.session.turn(call, deadline):
                    self.session.require("paused", "written")
                    answer = self._verify(deadline)
                    self.session.end_writing()
                    return answer
            case Finish():
                failpoints.reached("rank.finish")
                with self.session.turn(call, deadline):
                    self.session.finish(order.version)
                    self._reset_graphs()
                    failpoints.reached("rank.flush")
                    self.session.commit(order.version)
            case Resume():
                failpoints.reached("rank.resume")
                with self.session.turn(call, deadline), self.session.resuming(deadline):
                    failpoints.reached("rank.resumed")
            case Quarantine():
                failpoints.reached("rank.quarantine")
                self.session.quarantine(call, deadline)
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

    def _pause(self, mode: PauseMode, deadline: Deadline) -> None:
        self.session.check_abort()
        self.session.pause(mode, deadline.remaining("pausing"))
        with self.session.writing(then="paused"):
            self.session.begin()
        self._known[:] = False

    def _receive(self, order: Receive, call: Ticket, deadline: Deadline) -> int:
        failpoints.reached("rank.receive")
        with self._table:
            group = self._groups.get(order.group)
        if group is None or group.closed:
            raise MembershipError(f"group {order.group!r} is not initialized, or broke")
        self.session.check(call, "paused", "writing")  # another group's bucket, which ends before this one is loaded
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
        digested = ReadBack(self.manifest).digests(arrived, deadline)
        failpoints.reached("rank.load")
        with self.session.turn(call, deadline):
            self.session.require("paused")
            if group.closed:
                raise PeerLost(f"group {order.group!r} was destroyed while a bucket of it arrived; the bucket was not loaded")
            with self.session.writing(then="paused"):
                self.session.load([(named.name, named.tensor) for named in arrived])
            if digested is not None:
                self._received[digested[0]] = digested[1]
            self._known[[one.index for one in order.tensors]] = True
        return sum(one.nbytes for one in order.tensors)

    def _verify(self, deadline: Deadline) -> Digested:
        """The digests of the parameters themselves where all that was sent can be read back; else of what was received."""
        sent = self._known & np.array([spec.size > 0 for spec in self.manifest])
        digested = self.session.read_back(deadline)
        held = np.zeros(len(self.manifest), np.uint64)
        if digested is not None and not np.any(np.delete(sent, digested[0])):
            held[digested[0]] = digested[1]
            return Digested(held.astype("<u8").tobytes(), True)
        held[self._known] = self._received[self._known]
        return Digested(held.astype("<u8").tobytes(), False)


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
