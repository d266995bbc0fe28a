"""NeMo-RL's checkpoint engine: policy ranks stream whole tensors, and each vLLM worker receives all of them, inside its process.

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

import torch

from weightsync.engine.receiver import Receiver
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import Meeting, StreamSender, about_this_rank, arrange, join, offer_coordinator
from weightsync.integrations.updates import GRACE
from weightsync.launch import place_in_world
from weightsync.protocol.notices import tell
from weightsync.releases import refuse_calls, warn_if_untested

NAME = "weightsync.integrations.nemo_rl:Engine"
"""What the user writes."""
INTERFACE = "nemo_rl.utils.checkpoint_engines.base"
"""NeMo-RL's module that makes an engine by its name, and holds the base class that says what it calls."""

_log = logging.getLogger(__name__)
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
        self._about = about_this_rank()
        self._may_offer = True
        self._meeting = Meeting("", 0.0)
        self._receiver: Receiver | None = None
        self._owned, self._hosting = ExitStack(), ExitStack()
        self._owned.push(self._hosting)  # closed after the sender
        self._sender = StreamSender(self._options, bucket_size, "policy", self._owned)
        self._closing = weakref.finalize(self, self._owned.close)  # at the latest when the process exits

    def prepare(self) -> dict[str, object]:
        """Return what the other ranks must know of this one. The first rank of each side offers a coordinator."""
        if self._may_offer and "coordinator" not in self._about and place_in_world(None, None)[0] == 0:
            try:
                self._about |= offer_coordinator(self._options, self._hosting)
            except WeightSyncError as error:  # the other side's is enough
                return {**self._about, "refused": str(error)}
        return dict(self._about)

    def get_target_weight_layout(self) -> None:
        """Every policy rank sends whole tensors to all workers, which cut them: there is no one target."""

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> None:
        """Join, or stay joined, as a policy rank.

        Raises:
            WeightSyncError: No rank offers a coordinator, it cannot be reached, or refuses this rank.
        """
        self._meet(train_world_size, rollout_world_size, metadata)
        if worker_rank == 0:
            warn_if_untested("nemo_rl")
            tell(_log, f"the coordinator of this run is {self._meeting.coordinator}")
        self._sender.join(self._meeting.coordinator, worker_rank, train_world_size)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> None:
        """Join as a vLLM worker.

        Raises:
            WeightSyncError: As for :meth:`init_policy_process_group`.
        """
        about = self._meet(train_world_size, rollout_world_size, metadata)
        self._leave()
        self._layout = about["weight_layout"] if self.shard_expert_weights else None
        self._receiver = join(str(self._about["name"]), self._meeting, self._options, self._options.staging())

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
        self._meeting = arrange(offers[0], metadata, metadata[policy:])
        if self._about["name"] != offers[0]["name"]:
            self._may_offer = False
            self._about.pop("coordinator", None)
            self._hosting.close()
        mine = [about for about in metadata if about["name"] == self._about["name"]]
        if not mine:
            raise ConfigurationError(f"NeMo-RL passed metadata without {self._about['name']}, which this rank returned")
        return mine[0]

    def finalize(self) -> None:
        """Leave the coordinator, and free windows and buckets. A coordinator that runs here goes on, with its version numbers."""
        self._sender.leave()
        self._leave()

    def _leave(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Stream ``weights`` from a policy rank to all vLLM workers: see :meth:`StreamSender.send`."""
        await self._sender.send(weights, self._meeting)

    async def receive_weight_batches(self) -> AsyncIterator[Batch]:
        """Yield the tensors of one update, in a vLLM worker. Those of a batch are lent until the next is asked for.

        Raises:
            RoundFailed: The update failed, for this worker or on the policy's side.
            DeadlineExceeded: It did not come or go on in time.
            WeightSyncError: The coordinator cannot be reached, or refuses this worker.
        """
        if self._receiver is None:
            raise ConfigurationError("this vLLM worker lacks its coordinator: NeMo-RL did not initialize it")
        async with aclosing(self._receiver.receive_async(timeout=self._meeting.seconds + GRACE)) as batches:
            async for batch in batches:
                own = self._cut(batch)
                if own:
                    yield own

    def _cut(self, batch: Batch) -> Batch:
        """What this worker holds of the tensors of ``batch``."""
        if self._layout is None:
            return batch
        from nemo_rl.models.generation.vllm.refit_layout import select_hf_weight_for_vllm_target

        cut = ((name, select_hf_weight_for_vllm_target(name, tensor, target_layout=self._layout)) for name, tensor in batch)
        return [(name, tensor) for name, tensor in cut if tensor is not None]


def _unanswered(engine: type) -> list[str]:
    """Return the methods and arguments of NeMo-RL's base class that ``engine`` lacks; none where NeMo-RL is not imported."""
    base = getattr(sys.modules.get(INTERFACE), "CheckpointEngine", None)
    return [
        f"{name}({parameter})"
        for name in sorted(getattr(base, "__abstractmethods__", ()))
        for parameter in inspect.signature(getattr(base, name)).parameters
        if parameter not in inspect.signature(getattr(engine, name, lambda: None)).parameters
    ]
