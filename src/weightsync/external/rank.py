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
    ConfigurationError,
    DeadlineExceeded,
    MembershipError,
    PeerLost,
    WeightSyncError,
    to_wire,
)
from weightsync.external.checks import Incoming
from weightsync.external.commands import (
    Command,
    CommandAnswer,
    CommandDone,
    CommandFailed,
    Describe,
    Described,
    Digested,
    Finish,
    JoinGroup,
    LeaveGroup,
    PauseRank,
    QuarantineRank,
    Receive,
    ResumeRank,
    Step,
    Verify,
    decode_command,
    encode,
)
from weightsync.model import Box, Manifest, PauseMode
from weightsync.tensors.shards import Shard, torch_dtype
from weightsync.transports.broadcast.process_groups import ProcessGroup, init_custom_process_group

__all__ = ["DisaggregatedRank"]

_log = logging.getLogger(__name__)
_ALIGNMENT = 512


class DisaggregatedRank:
    """Executes the commands of the server's front on one engine rank.

    :meth:`handle` is thread-safe. Several groups may receive at the same time; the adapter's methods are still called one at a
    time. ``draft`` takes the tensors whose names begin with ``draft_prefix``. ``reset_graphs`` is called when an update is
    finished, before caches are dropped, to discard what captured the old weights (CUDA graphs, compiled code). ``device`` is where
    NCCL receives.

    Holds the groups and the digests of what was received. Its :class:`~weightsync.engine.session.EngineSession` holds the engine's
    state.

    Raises:
        ConfigurationError: An adapter has no ``load``.
    """

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
        self.rank = rank
        self.session = EngineSession(adapter, f"rank {rank} of updates from outside", draft=draft, draft_prefix=draft_prefix)
        self.manifest: Manifest = self.session.manifest
        self._device = torch.device(device)
        self._reset_graphs = reset_graphs
        self._groups: dict[str, ProcessGroup] = {}
        self._joining: dict[str, JoinGroup] = {}
        self._table = threading.Lock()
        self._received = np.zeros(len(self.manifest), np.uint64)
        self._known = np.zeros(len(self.manifest), np.bool_)

    def handle(self, message: bytes) -> bytes:
        """Execute one encoded command. Never raises: the answer says what failed."""
        try:
            answer = self.obey(decode_command(message))
        except WeightSyncError as error:
            answer = CommandFailed(*to_wire(error))
        except Exception as error:  # noqa: BLE001 - it crosses to the front, and is logged here
            _log.exception("rank %d of a disaggregated update failed", self.rank)
            answer = CommandFailed(*to_wire(error))
        failpoints.reached("rank.answer")
        return encode(answer)

    def close(self) -> None:
        """Leave all groups. The engine stays as it is."""
        with self._table:
            groups, self._groups = list(self._groups.values()), {}
            self._joining.clear()
        for group in groups:
            group.close()

    def obey(self, command: Command) -> CommandAnswer:
        """Execute one command. Raises what failed."""
        match command:
            case Describe():
                nccl = self._device.type == "cuda" and torch.distributed.is_nccl_available()
                return Described(self.manifest.tensors, ("gloo", "nccl") if nccl else ("gloo",))
            case JoinGroup():
                self._join(command)
                return CommandDone()
            case LeaveGroup():
                failpoints.reached("rank.leave")
                with self._table:
                    group = self._groups.pop(command.name, None)
                    self._joining.pop(command.name, None)
                if group is not None:
                    group.close()
                return CommandDone()
        call = self.session.receive(type(command).__name__, command.update, aborts=isinstance(command, QuarantineRank))
        return self._update(command, call, Deadline(command.timeout))

    def _update(self, command: Step, call: Ticket, deadline: Deadline) -> CommandAnswer:
        match command:
            case PauseRank():
                failpoints.reached("rank.pause")
                with self.session.turn(call, deadline):
                    self._pause(command.mode, deadline)
                failpoints.reached("rank.paused")
            case Receive():
                return CommandDone(self._receive(command, call, deadline))
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
                    self.session.finish(command.version)
                    self._reset_graphs()
                    failpoints.reached("rank.flush")
                    self.session.commit(command.version)
            case ResumeRank():
                failpoints.reached("rank.resume")
                with self.session.turn(call, deadline), self.session.resuming(deadline):
                    failpoints.reached("rank.resumed")
            case QuarantineRank():
                failpoints.reached("rank.quarantine")
                self.session.quarantine(call, deadline)
        return CommandDone()

    def _join(self, command: JoinGroup) -> None:
        failpoints.reached("rank.join")
        with self._table:
            if command.name in self._groups or command.name in self._joining:
                raise MembershipError(f"group {command.name!r} is already initialized")
            self._joining[command.name] = command
        group: ProcessGroup | None = None
        try:
            group = self._meet(command)
        finally:
            with self._table:
                wanted = self._joining.get(command.name) is command
                if wanted:
                    del self._joining[command.name]
                if wanted and group is not None:
                    self._groups[command.name] = group
        if not wanted:
            group.close()
            raise MembershipError(f"group {command.name!r} was destroyed while this rank joined it")

    def _meet(self, command: JoinGroup) -> ProcessGroup:
        """Join the group. Every failure at the other end raises the same error, which reveals nothing about the address."""
        try:
            return init_custom_process_group(
                cast(Any, command.backend),
                command.rank_offset + self.rank,
                command.world_size,
                command.name,
                Deadline(command.timeout),
                address=command.address,
                port=command.port,
                device=self._device if command.backend == "nccl" else None,
            )
        except (DeadlineExceeded, PeerLost) as error:
            _log.warning(
                "rank %d could not join group %r at %s:%d: %s", self.rank, command.name, command.address, command.port, error
            )
            raise PeerLost(
                f"group {command.name!r} did not come about within {command.timeout:g} s; the log of this engine rank says why"
            ) from None

    def _pause(self, mode: PauseMode, deadline: Deadline) -> None:
        self.session.check_abort()
        self.session.pause(mode, deadline.remaining("pausing"))
        with self.session.writing(then="paused"):
            self.session.begin()
        self._known[:] = False

    def _receive(self, command: Receive, call: Ticket, deadline: Deadline) -> int:
        failpoints.reached("rank.receive")
        with self._table:
            group = self._groups.get(command.group)
        if group is None or group.closed:
            raise MembershipError(f"group {command.group!r} is not initialized, or broke")
        self.session.check(call, "paused", "writing")  # another group's bucket, which ends before this one is loaded
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        memory, tensors = _stage(command, device)
        group.broadcast(memory, deadline)
        failpoints.reached("rank.arrived")
        if command.flattened:
            tensors = _unflatten(memory[0], command.tensors) if memory else []
        arrived = [  # under the names that the loaders know: a sender may use the aliases
            Shard(self.manifest[incoming.index].name, tensor.shape, Box.whole(tuple(tensor.shape)), tensor)
            for incoming, tensor in zip(command.tensors, tensors, strict=True)
        ]
        # Of a tensor that came under several of its names, the last is what a loader leaves.
        digested = ReadBack(self.manifest).digests(list({shard.name: shard for shard in arrived}.values()), deadline)
        failpoints.reached("rank.load")
        with self.session.turn(call, deadline):
            self.session.require("paused")
            if group.closed:
                raise PeerLost(f"group {command.group!r} was destroyed while a bucket of it arrived; the bucket was not loaded")
            with self.session.writing(then="paused"):
                self.session.load([(named.name, named.tensor) for named in arrived])
            if digested is not None:
                self._received[digested[0]] = digested[1]
            self._known[[tensor.index for tensor in command.tensors]] = True
        return sum(tensor.nbytes for tensor in command.tensors)

    def _verify(self, deadline: Deadline) -> Digested:
        """Digest the parameters themselves if all tensors that were sent can be read back, else report what was received."""
        sent = self._known & np.array([spec.size > 0 for spec in self.manifest])
        digested = self.session.read_back(deadline)
        held = np.zeros(len(self.manifest), np.uint64)
        if digested is not None and not np.any(np.delete(sent, digested[0])):
            held[digested[0]] = digested[1]
            return Digested(held.astype("<u8").tobytes(), True)
        held[self._known] = self._received[self._known]
        return Digested(held.astype("<u8").tobytes(), False)


def _stage(order: Receive, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Memory for the collectives, in their order, and the tensors in it, where each has a collective of its own."""
    if order.flattened:
        total = sum(tensor.nbytes for tensor in order.tensors)
        return ([torch.empty(total, dtype=torch.uint8, device=device)] if order.tensors else []), []
    places, end = [], 0
    for tensor in order.tensors:
        places.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    tensors = [
        memory[place : place + tensor.nbytes].view(torch_dtype(tensor.dtype)).view(tensor.shape)
        for tensor, place in zip(order.tensors, places, strict=True)
    ]
    return tensors, tensors


def _unflatten(flat: torch.Tensor, tensors: Sequence[Incoming]) -> list[torch.Tensor]:
    """Views of a flattened bucket; a copy where mixed dtypes left a tensor at an odd address."""
    views, place = [], 0
    for tensor in tensors:
        dtype = torch_dtype(tensor.dtype)
        part = flat[place : place + tensor.nbytes]
        if place % dtype.itemsize:
            part = part.clone()
        views.append(part.view(dtype).view(tensor.shape))
        place += tensor.nbytes
    return views
