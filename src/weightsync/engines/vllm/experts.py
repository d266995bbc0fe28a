"""Experts that vLLM moves between workers to balance their load (EPLB): where each is, and none moves during a round.

vLLM's ranks of expert parallelism rebalance in lockstep: each counts its steps, and all meet in collectives. So they decide
together, too, whether a round of weights is under way, at the two points where all are anyway: before they begin to rebalance, and
while a rebalancing in the background (``use_async``) is under way. If any of them is held there, none rebalances.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from weightsync.engines.processing import restored
from weightsync.engines.wrapped_methods import wrap_once
from weightsync.errors import ConfigurationError, DeadlineExceeded, LayoutError
from weightsync.releases import BALANCING, check_interface
from weightsync.tracing.slots import at_slots
from weightsync.tracing.tracer import Traced

EplbState: TypeAlias = Any
"""``vllm.distributed.eplb.eplb_state.EplbState``: the balancing of a worker's models."""

_OWN = "_weightsync_hold"


class BalancingHold:
    """Keeps the experts of one worker where they are during rounds. Used by vLLM's thread and by weightsync's."""

    def __init__(self, state: EplbState) -> None:
        self._state = state
        self._step = threading.Lock()
        self._until = 0.0
        self._discards = False
        """What was copied in the background before a round is to be discarded: it would replace new weights by old ones."""
        self.moves = 0
        """Counted up before experts may move. Any thread may read it."""

    def begin(self, seconds: float) -> None:
        """Hold from now on, for ``seconds`` at most. Waits for a step, in which experts may be moving.

        Raises:
            DeadlineExceeded: The step did not end in time.
        """
        if not self._step.acquire(timeout=seconds):
            raise DeadlineExceeded(f"vLLM's experts were moving for {seconds:.3g} s")
        try:
            self._until = time.monotonic() + seconds
            self.discard()
        finally:
            self._step.release()

    def discard(self) -> None:
        """Let vLLM discard what is copied in the background now. No step runs."""
        self._discards = self._state.is_async

    def end(self) -> None:
        """Let experts move again. The engine is paused, or was resumed just now."""
        self._until = 0.0

    @property
    def _holds(self) -> bool:
        return time.monotonic() < self._until

    def step(self, own: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Let vLLM count its step, and perhaps rebalance."""
        with self._step:
            if not any(model.rebalanced for model in self._state.model_states.values()):
                self._discards = False
            own(self._state, *args, **kwargs)

    def rearrange(self, own: Any, is_profile: bool = False, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Let vLLM rebalance, unless a rank is held. Then it is asked again after the next step."""
        if not is_profile:
            if _any_rank(self._holds):
                self._state.expert_rearrangement_step = self._state.expert_rearrangement_step_interval
                return None
            self.moves += 1
        return own(self._state, is_profile, *args, **kwargs)

    def ready(self, own: Any, model: Any) -> bool:  # noqa: ANN401 - vLLM's
        """Let vLLM take a layer that was copied in the background, unless a rank is held: then discard it, and those after it.

        As ``EplbState.drain_async`` does, but one layer in a step. To wait for all may take long, or for ever if the thread died.
        """
        discards = self._discards = _any_rank(self._holds or self._discards)  # until no layer is left
        ready = bool(own(self._state, model))
        if ready and discards:
            result, model.pending_result = model.pending_result, None
            if result.layer_idx == model.model.num_moe_layers - 1:
                model.rebalanced = False
                self._discards = any(each.rebalanced for each in self._state.model_states.values())
            result.consumed_event.record()
            return False
        self.moves += ready
        return ready


def _any_rank(yes: bool) -> bool:
    """Whether any rank of expert parallelism says yes. All ask together."""
    from vllm.distributed.parallel_state import get_ep_group

    flag = torch.tensor([int(yes)], dtype=torch.int32)
    torch.distributed.all_reduce(flag, group=get_ep_group().cpu_group)
    return bool(flag.item())


def hold_of(state: EplbState) -> BalancingHold:
    """Return the one hold of ``state``."""
    hold: BalancingHold = state.__dict__.get(_OWN) or state.__dict__.setdefault(_OWN, BalancingHold(state))
    return hold


def follow_balancing() -> None:
    """Ask for holds wherever vLLM rebalances in this process. Every rank does so before its engine serves. Idempotent.

    Raises:
        ConfigurationError: This release of vLLM lacks a name that is needed. The message has it.
    """
    check_interface("vllm", BALANCING)
    from vllm.distributed.eplb.eplb_state import EplbState as Kind

    wrap_once(Kind, "step", lambda own, state, *args, **kwargs: hold_of(state).step(own, *args, **kwargs))
    wrap_once(Kind, "rearrange", lambda own, state, *args, **kwargs: hold_of(state).rearrange(own, *args, **kwargs))
    wrap_once(Kind, "_all_ranks_result_ready", lambda own, state, model: hold_of(state).ready(own, model))


class MovingExperts:
    """Places of one model's experts on this rank: :class:`~weightsync.engines.traced_shards.MovingParts`.

    A slot is a place for the weights of one expert: vLLM calls it a physical expert, and numbers those of all ranks.

    Args:
        model: The serving model.
        state: The balancing of this worker.

    Raises:
        ConfigurationError: The model's experts are not of the kind that can be followed.
    """

    def __init__(self, model: torch.nn.Module, state: EplbState | None) -> None:
        from vllm.distributed.parallel_state import get_ep_group

        modules = set(model.modules())
        mine = [] if state is None else [each for each in state.model_states.values() if each.model in modules]
        if state is None or len(mine) != 1:
            raise ConfigurationError("vLLM's balancing of this worker does not know its model")
        self.hold, self._state = hold_of(state), mine[0]
        kind = self._state.model
        if kind.num_logical_experts != kind.num_routed_experts:
            raise ConfigurationError("vLLM has fused the shared experts of this model with the others, which are not followed")
        first = state.build_initial_global_physical_to_logical_map(kind.num_routed_experts, kind.num_redundant_experts)
        self._initial = torch.tensor(first).repeat(kind.num_moe_layers, 1)
        self._slot = {logical: slot for slot, logical in reversed(list(enumerate(first)))}
        begin = get_ep_group().rank_in_group * kind.num_local_physical_experts
        self._own = slice(begin, begin + kind.num_local_physical_experts)
        addresses = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
        self._layers: dict[str, int] = {}
        self._owners: dict[str, Any] = {}
        for layer, weights in enumerate(kind.expert_weights):
            for weight in weights:
                name = addresses.get(weight.data_ptr())
                if name is None:
                    raise ConfigurationError("vLLM's balancing moves weights that are no parameters of the model")
                self._layers[name], self._owners[name] = layer, model.get_submodule(name.rpartition(".")[0])
        self.look()

    def look(self) -> None:
        """Read where the experts are, when the device has done what vLLM asked of it. None may be moving."""
        live: torch.Tensor = self._state.physical_to_logical_map
        self._looked = self.hold.moves
        if live.device.type == "cuda":
            torch.cuda.synchronize(live.device)
        self._map = live.to("cpu", torch.long, copy=True)
        self._key = self._map.numpy().tobytes()

    @property
    def moved(self) -> bool:
        """Whether experts may have moved since :meth:`look`."""
        return self._looked != self.hold.moves

    def key(self) -> object:
        """See :class:`~weightsync.engines.traced_shards.MovingParts`."""
        return self._key

    def placed(self, traced: Traced, *, initial: bool = False) -> Traced:
        """See :class:`~weightsync.engines.traced_shards.MovingParts`.

        Raises:
            LayoutError: vLLM's map is not one of slots to experts.
        """
        experts = self._initial if initial else self._map
        slots: dict[str, Sequence[int]] = {}
        for name, layer in self._layers.items():
            row = experts[layer, self._own].tolist()
            if not self._slot.keys() >= set(row):
                raise LayoutError(f"vLLM's map has slots without an expert in {name}")
            slots[name] = [self._slot[expert] for expert in row]
        return at_slots(traced, slots)

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """Give the model parameters without bytes that hold the experts of all ranks, in the block: its loader fills every slot."""
        managers = [owner.expert_map_manager for owner in self._owners.values()]
        with restored([*(owner._parameters for owner in self._owners.values()), *(vars(manager) for manager in managers)]):
            for manager in managers:
                manager._expert_map = None
            for name, owner in self._owners.items():
                key = name.rpartition(".")[2]
                held = owner.get_parameter(key)
                shape = (self._initial.shape[1], *held.shape[1:])
                whole: Any = torch.empty(shape, dtype=held.dtype, device="meta")
                whole.__class__, whole.__dict__ = held.__class__, dict(vars(held))
                owner._parameters[key] = whole
            yield
