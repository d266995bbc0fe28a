"""One engine rank of a disaggregated update: its groups, its adapters, and the digests of what it received."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch

from weightsync import errors, failpoints
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.read_back import ReadBack
from weightsync.engine.session import EngineSession, Ticket
from weightsync.engine.session_front import SessionFront
from weightsync.errors import ConfigurationError, DeadlineExceeded, MembershipError, PeerLost, ProtocolError, WeightSyncError
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.protocol.messages import Answer, Call, Failure, Frame, Pause, decode, encode
from weightsync.protocol.update_messages import Describe, Described, Digested, JoinGroup, LeaveGroup, Receive, Verify
from weightsync.tensors.shards import Shard, torch_dtype
from weightsync.transports.broadcast.process_groups import ProcessGroup, init_custom_process_group

_log = logging.getLogger(__name__.replace("_", ".", 1))  # below weightsync, whose level and handlers it has
_ALIGNMENT = 512


class DisaggregatedRank(SessionFront):
    """Answers the calls of the server's front for one engine rank.

    :meth:`handle` is thread-safe. Several groups may receive at the same time; the adapter's methods are still called one at a
    time. ``draft`` takes the tensors whose names begin with ``draft_prefix``. ``reset_graphs`` is called when an update is
    finished, before caches are dropped, to discard what captured the old weights (CUDA graphs, compiled code). ``device`` is where
    NCCL receives.

    Holds the groups and the digests of what was received. Its :class:`~weightsync.engine.session.EngineSession` holds the engine's
    state.

    Raises:
        ConfigurationError: An adapter has no ``load``.
    """

    _points = "rank"

    def __init__(
        self,
        adapter: EngineAdapter,
        draft: EngineAdapter | None = None,
        *,
        rank: int = 0,
        draft_prefix: str = "mtp.",
        device: torch.device | str = "cpu",
        reset_graphs: Callable[[], None] = lambda: None,
    ) -> None:
        for loading in (adapter, draft):
            if loading is not None and not loading.can_load:
                raise ConfigurationError(f"updates from outside are loaded by load(), and the {loading.name} adapter has none")
        member = f"rank {rank} of updates from outside"
        super().__init__(EngineSession(adapter, member, draft=draft, draft_prefix=draft_prefix), reset_graphs)
        self._handlers |= {Pause: self._pause, Verify: self._verify}
        self._at_once |= {Describe: self._describe, JoinGroup: self._join, LeaveGroup: self._leave, Receive: self._receive}
        self.rank = rank
        self.manifest: Manifest = self.session.manifest
        self._device = torch.device(device)
        nccl = self._device.type == "cuda" and torch.distributed.is_nccl_available()
        self.backends = ("gloo", "nccl") if nccl else ("gloo",)
        self._groups: dict[str, ProcessGroup] = {}
        self._joining: dict[str, JoinGroup] = {}
        self._table = threading.Lock()
        self._received = np.zeros(len(self.manifest), np.uint64)
        self.known = np.zeros(len(self.manifest), np.bool_)
        """Which tensors of the manifest this update has received and loaded."""

    def handle(self, message: bytes) -> bytes:
        """Answer one encoded call. Never raises: the answer says what failed."""
        frame: Frame
        try:
            call = decode(message)
            if not isinstance(call, Call):
                raise ProtocolError(f"a {type(call).__name__} frame is not a call")
            frame = Answer(call.id, self.answer(call.body, call.timeout, call.update))
        except Exception as error:  # noqa: BLE001 - it crosses to the front, and is logged here
            if not isinstance(error, WeightSyncError):
                _log.exception("rank %d of a disaggregated update failed", self.rank)
            frame = Failure(0, *errors.to_wire(error))
        failpoints.reached("rank.answer")
        return encode(frame)

    def close(self) -> None:
        """Leave all groups. The engine stays as it is."""
        with self._table:
            groups, self._groups = list(self._groups.values()), {}
            self._joining.clear()
        for group in groups:
            group.close()

    def _describe(self, body: Describe, call: Ticket, deadline: Deadline) -> Described:
        return Described(self.manifest.tensors, self.backends)

    def _join(self, body: JoinGroup, call: Ticket, deadline: Deadline) -> None:
        with self._table:
            if body.name in self._groups or body.name in self._joining:
                raise MembershipError(f"group {body.name!r} is already initialized")
            self._joining[body.name] = body
        group: ProcessGroup | None = None
        try:
            group = self._meet(body, deadline)
        finally:
            with self._table:
                wanted = self._joining.get(body.name) is body
                if wanted:
                    del self._joining[body.name]
                if wanted and group is not None:
                    self._groups[body.name] = group
        if not wanted:
            group.close()
            raise MembershipError(f"group {body.name!r} was destroyed while this rank joined it")

    def _leave(self, body: LeaveGroup, call: Ticket, deadline: Deadline) -> None:
        with self._table:
            group = self._groups.pop(body.name, None)
            self._joining.pop(body.name, None)
        if group is not None:
            group.close()

    def _meet(self, body: JoinGroup, deadline: Deadline) -> ProcessGroup:
        """Join the group. Every failure at the other end raises the same error, which reveals nothing about the address."""
        try:
            return init_custom_process_group(
                cast(Any, body.backend),
                body.rank_offset + self.rank,
                body.world_size,
                body.name,
                deadline,
                address=body.address,
                port=body.port,
                device=self._device if body.backend == "nccl" else None,
            )
        except (DeadlineExceeded, PeerLost) as error:
            _log.warning("rank %d could not join group %r at %s:%d: %s", self.rank, body.name, body.address, body.port, error)
            raise PeerLost(
                f"group {body.name!r} did not come about within {deadline.seconds:g} s; the log of this engine rank says why"
            ) from None

    def _pause(self, body: Pause, deadline: Deadline) -> None:
        self.session.pause(body.mode, deadline.remaining("pausing"))
        with self.session.writing(then="paused"):
            self.session.begin()
        self.known[:] = False
        failpoints.reached("rank.paused")

    def _receive(self, body: Receive, call: Ticket, deadline: Deadline) -> None:
        with self._table:
            group = self._groups.get(body.group)
        if group is None or group.closed:
            raise MembershipError(f"group {body.group!r} is not initialized, or broke")
        self.session.check(call, "paused", "writing")  # another group's bucket, which ends before this one is loaded
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        specs = [self.manifest[index] for index in body.tensors]  # with the names that loaders know: a sender may use aliases
        memory, parts = _stage(specs, 1 if body.flattened else _ALIGNMENT, device)
        group.broadcast([memory] if body.flattened and specs else list(map(_viewed, specs, parts)), deadline)
        failpoints.reached("rank.arrived")
        arrived = [
            Shard(spec.name, spec.shape, Box.whole(spec.shape), _viewed(spec, part))
            for spec, part in zip(specs, parts, strict=True)
        ]
        # Of a tensor that came under several of its names, the last is what a loader leaves.
        digested = ReadBack(self.manifest).digests(list({shard.name: shard for shard in arrived}.values()), deadline)
        failpoints.reached("rank.load")
        with self.session.turn(call, deadline):
            self.session.require("paused")
            if group.closed:
                raise PeerLost(f"group {body.group!r} was destroyed while a bucket of it arrived; the bucket was not loaded")
            with self.session.writing(then="paused"):
                self.session.load([(named.name, named.tensor) for named in arrived])
            if digested is not None:
                self._received[digested[0]] = digested[1]
            self.known[list(body.tensors)] = True

    def _verify(self, body: Verify, deadline: Deadline) -> Digested:
        """Digest the parameters themselves if all tensors that were sent can be read back; otherwise report what was received."""
        self.session.require("paused", "written")
        sent = self.known & np.array([spec.size > 0 for spec in self.manifest])
        digested = self.session.read_back(deadline)
        held = np.zeros(len(self.manifest), np.uint64)
        installed = digested is not None and not np.any(np.delete(sent, digested[0]))
        if digested is not None and installed:
            held[digested[0]] = digested[1]
        else:
            held[self.known] = self._received[self.known]
        self.session.end_writing()
        return Digested(held.astype("<u8").tobytes(), installed)


def _stage(specs: Sequence[TensorSpec], alignment: int, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Memory for tensors, and the bytes of each in it."""
    ends = [0, *accumulate(-(-spec.nbytes // alignment) * alignment for spec in specs)]
    memory = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    return memory, [memory[start : start + spec.nbytes] for start, spec in zip(ends, specs, strict=False)]


def _viewed(spec: TensorSpec, part: torch.Tensor) -> torch.Tensor:
    """The tensor of these bytes; a copy where mixed dtypes of a flattened bucket left it at an odd address."""
    dtype = torch_dtype(spec.dtype)
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(spec.shape)
