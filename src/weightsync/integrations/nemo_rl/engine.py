"""NeMo-RL's checkpoint engine, inside its policy workers and vLLM's workers.

Policy ranks publish their own shards (:mod:`weightsync.integrations.nemo_rl.workers`), and vLLM's workers read what they hold of
them, within NeMo-RL's call for an update. Nothing is gathered. If any rank cannot take part in that, policy ranks stream whole
tensors, and each vLLM worker receives all of them. What ranks say before the first update decides it for all of them.

NeMo-RL makes one object of the same class on each policy rank and in each vLLM worker, and carries what :meth:`RefitEngine.prepare`
returns to all of them, once. After that it asks all ranks for one update after the other. It says which side an object is on only
after ``prepare``, so the first rank of each side offers a coordinator, and all but one of them take theirs back.

Policy ranks and workers stay joined from one update to the next. A worker that did not take an update takes the next one.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

import msgspec
import torch

from weightsync.engine.receiver import Receiver
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.integrations import stream_ranks
from weightsync.integrations.nemo_rl.workers import about_engine, calling_worker, policy_shards
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import Meeting, ShardSource, StreamSender
from weightsync.integrations.updates import GRACE
from weightsync.launch import place_in_world
from weightsync.model import Manifest
from weightsync.protocol.notices import tell
from weightsync.releases import refuse_calls, warn_if_untested

NAME = "weightsync.integrations.nemo_rl:Engine"
"""What the user writes."""
INTERFACE = "nemo_rl.utils.checkpoint_engines.base"
"""NeMo-RL's module that makes an engine by its name, and holds the base class that says what it calls."""

_log = logging.getLogger(__name__)
_OWN = "_weightsync_engine"
_REASON = 400  # characters of a reason that travels
_WHERE = f"policy.generation.refit_cfg['{NAME}']"
Batch = list[tuple[str, torch.Tensor]]


class RefitEngine:
    """What NeMo-RL's ``CheckpointEngine`` is, without being its subclass: nothing of NeMo-RL is imported to make it.

    With ``shard_expert_weights`` a vLLM worker loads of each expert only what it holds itself: whole tensors arrive, are cut, and
    go to NeMo-RL's direct loader. ``release_after_refit`` makes NeMo-RL call :meth:`finalize` after each update. The other options
    are those of :class:`~weightsync.integrations.stream_options.Options`.

    Raises:
        ConfigurationError: An option is unknown or wrong, or NeMo-RL calls more than this class has.
    """

    def __init__(
        self, bucket_size: int, release_after_refit: bool = False, shard_expert_weights: bool = False, **options: object
    ) -> None:
        refuse_calls("nemo_rl", _unanswered(type(self)))
        self._options = Options.of(options, _WHERE)
        if not isinstance(shard_expert_weights, bool):
            raise ConfigurationError(f"{_WHERE}: shard_expert_weights is true or false, not {shard_expert_weights!r}")
        self.shard_expert_weights = shard_expert_weights
        self._layout: Any = None
        self._worker, self._is_vllms = calling_worker()
        self._about = stream_ranks.about_this_rank()
        self._may_offer = True
        self._meeting = Meeting("", 0.0)
        self._receiver: Receiver | None = None
        self._made: tuple[object, ShardSource, Manifest] | None = None
        """A policy worker's model, and what it publishes."""
        self._direct = self._leads = False
        """Whether vLLM's workers read the shards of policy ranks, and whether this is the first of them."""
        self._sent = False
        """Whether this policy rank has sent since :meth:`end_update`."""
        self._owned, self._hosting = ExitStack(), ExitStack()
        self._owned.push(self._hosting)  # closed after the sender
        self._sender = StreamSender(self._options, bucket_size, "policy", self._owned)
        self._closing = weakref.finalize(self, self._owned.close)  # at the latest when the process exits

    def prepare(self) -> dict[str, object]:
        """Return what the other ranks must know of this one. The first rank of each side offers a coordinator."""
        refused: dict[str, object] = {}
        if self._may_offer and "coordinator" not in self._about and place_in_world(None, None)[0] == 0:
            try:
                self._about |= stream_ranks.offer_coordinator(self._options, self._hosting)
            except WeightSyncError as error:  # the other side's is enough
                refused["refused"] = str(error)
        return {**self._about, **refused, **self._about_way()}

    def _about_way(self) -> dict[str, object]:
        """Whether this rank can publish or read shards, or why not."""
        try:
            if not self._options.direct:
                raise ConfigurationError("the option direct is false")
            if self._worker is None:
                raise ConfigurationError("NeMo-RL does not show its worker")
            if self._is_vllms:
                return about_engine(self._worker)
            if self._made is None or self._made[0] is not self._worker.model:
                self._made = (self._worker.model, *policy_shards(self._worker, self._options))
        except Exception as error:  # noqa: BLE001 - NeMo-RL's, vLLM's and ours; all ranks then stream
            return {"streams": " ".join(str(error).split())[:_REASON]}
        return {"checkpoint": self._made[2].fingerprint}

    def get_target_weight_layout(self) -> None:
        """Every policy rank sends whole tensors to all workers, which cut them: there is no one target."""

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> None:
        """Join, or stay joined, as a policy rank.

        Raises:
            WeightSyncError: No rank offers a coordinator, it cannot be reached, or refuses this rank.
        """
        before = self._meeting.coordinator
        self._meet(train_world_size, rollout_world_size, metadata)
        if worker_rank == 0 and self._meeting.coordinator != before:
            warn_if_untested("nemo_rl")
            tell(_log, f"the coordinator of this run is {self._meeting.coordinator}")
        place = self._meeting.coordinator, worker_rank, train_world_size
        if not self._direct or self._made is None:
            self._sender.join(*place)
            return
        self._worker._prepare_checkpoint_engine_weight_send()  # as for an update: a copy is made where the parameters are
        try:
            self._sender.join(*place, self._made[1])
        finally:
            self._worker._finalize_checkpoint_engine_weight_send()

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> None:
        """Join as a vLLM worker.

        Raises:
            WeightSyncError: As for :meth:`init_policy_process_group`.
        """
        about = self._meet(train_world_size, rollout_world_size, metadata)
        if self._direct:
            transports = None if self._options.transports is None else list(self._options.transports)
            self._worker.weightsync_join(
                self._meeting.coordinator, _replica_of(about, metadata[train_world_size:]), transports=transports,
                token_file=stream_ranks.token_file(),
            )  # fmt: skip
            return
        self._leave()
        self._layout = about["weight_layout"] if self.shard_expert_weights else None
        self._receiver = stream_ranks.join(str(self._about["name"]), self._meeting, self._options, self._options.staging())

    def _meet(self, policy: int, rollout: int, metadata: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Find out where to meet. Returns what NeMo-RL knows of this rank."""
        if len(metadata) != policy + rollout or not all(isinstance(about, Mapping) and "name" in about for about in metadata):
            raise ConfigurationError(
                f"NeMo-RL passed metadata of {len(metadata)} ranks, not of {policy} policy ranks and {rollout} vLLM workers that "
                f"all have {NAME}"
            )
        offers = [about for about in metadata if "coordinator" in about]
        if not offers:
            reasons = "; ".join(str(about["refused"]) for about in metadata if "refused" in about)
            raise ConfigurationError(f"no rank offers a coordinator: {reasons or 'no rank is the first of its side'}")
        self._meeting = stream_ranks.arrange(offers[0], metadata, metadata[policy:])
        reason = stream_ranks.why_streamed(metadata[:policy], metadata[policy:])
        self._direct, self._leads = not reason, self._about["name"] == metadata[0]["name"]
        if self._direct:
            replicas = dict.fromkeys(_replica_of(about, metadata[policy:]) for about in metadata[policy:])
            self._meeting = msgspec.structs.replace(self._meeting, receivers=tuple(replicas))
        elif self._leads:
            stream_ranks.say_why("policy ranks gather whole tensors, and vLLM's workers receive all of them", reason)
        if self._about["name"] != offers[0]["name"]:
            self._may_offer = False
            self._about.pop("coordinator", None)
            self._hosting.close()
        mine = [about for about in metadata if about["name"] == self._about["name"]]
        if not mine:
            raise ConfigurationError(f"NeMo-RL passed metadata without {self._about['name']}, which this rank returned")
        return mine[0]

    def finalize(self, call: int = 0) -> None:
        """Leave the coordinator, and free windows and buckets. A coordinator that runs here goes on, with its version numbers.

        The first policy rank ends vLLM's ``call`` if no update is in it.
        """
        self._sender.leave(call if self._leads else 0)
        self._leave()

    def end_update(self, call: int) -> bool:
        """On shared GPUs, free what this policy rank published, unless it keeps a copy. Returns whether it stays joined.

        NeMo-RL offloads its parameters then, so a rank stays only if the engines read a copy. One that failed leaves, which ends
        vLLM's ``call``.
        """
        sent, self._sent = self._sent, False
        if sent and self._sender.keeps_copy:
            return True
        self.finalize(call)
        return False

    def _leave(self) -> None:
        if hasattr(self._worker, "weightsync_leave"):
            self._worker.weightsync_leave()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Bring ``weights`` from a policy rank to all vLLM workers: see :meth:`StreamSender.send`.

        Where vLLM's workers read the shards of policy ranks, ``weights`` are not iterated over: nothing of them is gathered.

        Raises:
            ConfigurationError: The worker's model was replaced since this rank joined.
            WeightSyncError: As :meth:`StreamSender.send`.
        """
        self._sent = False  # an earlier send may have ended after end_update(): methods of an actor overlap
        if self._direct and self._made is not None and self._made[0] is not self._worker.model:
            raise ConfigurationError(
                "this policy worker has another model than the one with which it joined, which would be published: let all ranks "
                "leave (finalize) and join again"
            )
        result = await self._sender.send(None if self._direct else weights, self._meeting)
        self._sent = True
        if self._direct and self._leads:
            stream_ranks.say_verified("policy", all(replica.verified == "installed" for replica in result.replicas))

    async def receive_weight_batches(self) -> AsyncIterator[Batch]:
        """Yield the tensors of one update, in a vLLM worker. Those of a batch are lent until the next is asked for.

        Where this worker reads the shards of policy ranks, it does so here, and none are yielded.

        Raises:
            RoundFailed: The update failed, for this worker or on the policy's side.
            DeadlineExceeded: It did not come or go on in time.
            WeightSyncError: The coordinator cannot be reached, or refuses this worker.
        """
        if self._direct:
            self.read_shards()
            return
        if self._receiver is None:
            raise ConfigurationError("this vLLM worker lacks its coordinator: NeMo-RL did not initialize it")
        async with aclosing(self._receiver.receive_async(timeout=self._meeting.seconds + GRACE)) as batches:
            async for batch in batches:
                own = self._cut(batch)
                if own:
                    yield own

    def read_shards(self, call: int = 0) -> bool:
        """Let vLLM's worker read its part of one update. Raises what ``weightsync_update`` raises."""
        self._worker.weightsync_update(timeout=self._meeting.seconds + GRACE, call=call)
        return True

    def _cut(self, batch: Batch) -> Batch:
        """What this worker holds of the tensors of ``batch``."""
        if self._layout is None:
            return batch
        from nemo_rl.models.generation.vllm.refit_layout import select_hf_weight_for_vllm_target

        cut = ((name, select_hf_weight_for_vllm_target(name, tensor, target_layout=self._layout)) for name, tensor in batch)
        return [(name, tensor) for name, tensor in cut if tensor is not None]


def in_worker(worker: Any, method: str, options: dict[str, Any], arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - vLLM's
    """Call a method of the :class:`RefitEngine` of a vLLM worker, or of vLLM's wrapper around it. The driver sends this."""
    engine = worker.__dict__.get(_OWN)
    if engine is None:
        engine = worker.__dict__[_OWN] = RefitEngine(1 << 20, **options)
        engine._worker, engine._is_vllms, engine._may_offer = worker, True, False
    return getattr(engine, method)(**arguments)


def _replica_of(about: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]]) -> str:
    """The name of the engine of a vLLM worker: that of its first worker. NeMo-RL adds ``rank``, the place within the engine."""
    names = [str(other["name"]) for other in rollouts]
    return names[names.index(str(about["name"])) - int(about["rank"])]


def _unanswered(engine: type) -> list[str]:
    """Return the methods and arguments of NeMo-RL's base class that ``engine`` lacks; none where NeMo-RL is not imported."""
    base = getattr(sys.modules.get(INTERFACE), "CheckpointEngine", None)
    return [
        f"{name}({parameter})"
        for name in sorted(getattr(base, "__abstractmethods__", ()))
        for parameter in inspect.signature(getattr(base, name)).parameters
        if parameter not in inspect.signature(getattr(engine, name, lambda: None)).parameters
    ]
