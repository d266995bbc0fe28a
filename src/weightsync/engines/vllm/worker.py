"""Weight transfer engine that vLLM makes in every worker for ``{"backend": "weightsync"}``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.v1.worker.gpu_worker import Worker

from weightsync.config import variable
from weightsync.distributions import how_to_install
from weightsync.engines.attach_options import AttachOptions
from weightsync.engines.hf_checkpoint import HfCheckpoint, checkpoint_of
from weightsync.engines.traced_shards import chosen_shards
from weightsync.engines.vllm.adapter import VllmWorkerAdapter
from weightsync.engines.vllm.controls import Controls, LoraControls
from weightsync.engines.vllm.direct import direct_shards
from weightsync.engines.vllm.experts import MovingExperts, follow_balancing
from weightsync.engines.vllm.loading import install, install_some, load_in_sessions, untouched, without_lora_layers
from weightsync.engines.vllm.local_controls import controls_at, is_local
from weightsync.engines.vllm.loras import WorkerLoras
from weightsync.engines.vllm.patches import add_install_method
from weightsync.engines.vllm.together import global_rank, refuse_balancing, together
from weightsync.engines.wrapped_methods import wrap_once
from weightsync.errors import ConfigurationError, LoadError
from weightsync.releases import REPLICA, check_interface, release_of, warn_if_untested

if TYPE_CHECKING:
    from weightsync_disaggregated.push_receiver import PushedUpdates

_log = logging.getLogger(__name__)


@dataclass
class InitInfo(AttachOptions, WeightTransferInitInfo):  # type: ignore[misc]
    """Settings with which a worker joins a coordinator: ``init_info`` of vLLM's ``/init_weight_transfer_engine``."""

    control: str
    """Address of the engine's owner for rank 0: the URL of a vLLM server, or an address that ``attach`` made."""
    draft_prefix: str | None = None
    """Prefix of the draft model's tensor names; by default ``WEIGHTSYNC_DRAFT_PREFIX``. Without it a draft model is not updated."""
    engines: int = 1
    """Data-parallel engines behind one server. vLLM hides their number from the workers of a dense model."""
    leave: bool = False
    """Only leave the coordinator. All other fields are ignored."""


@dataclass
class GroupInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The other form of ``init_info``: a body of ``init_weights_update_group``, sent by ``weightsync push``."""

    body: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Empty, because the weights to load are already staged."""


class WeightsyncEngine(WeightTransferEngine):  # type: ignore[misc]
    """Owner of this worker's weightsync engine rank. Loads the staged weights in :meth:`install`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        check_interface("vllm", REPLICA)
        warn_if_untested("vllm")
        super().__init__(*args, **kwargs)
        self._balanced = bool(self.parallel_config.enable_eplb)
        if self._balanced:
            if getattr(self.parallel_config, "enable_elastic_ep", False):
                raise ConfigurationError(
                    "elastic expert parallelism (--enable-elastic-ep) changes the number of vLLM's workers, which is not followed"
                )
            follow_balancing()
        self.balancer: Any = None
        """vLLM's ``EplbState`` of this worker, if there is one."""
        if not variable("WEIGHTSYNC_COORDINATOR"):
            _log.info("weightsync: no coordinator yet: set WEIGHTSYNC_COORDINATOR before vLLM starts, or call attach_server()")
        self._owned = ExitStack()
        self._adapter: VllmWorkerAdapter | None = None
        self._loras: WorkerLoras | None = None
        self._pushed: PushedUpdates | None = None
        self._within = False  # inside a call that all workers make together

    @property
    def joined(self) -> bool:
        """Whether this worker is a rank of a replica, or of a push."""
        return self._adapter is not None

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo | GroupInfo:
        """Parse the body of vLLM's route as one of two kinds."""
        info: InitInfo | GroupInfo = GroupInfo(init_dict) if "master_address" in init_dict else super().parse_init_info(init_dict)
        return info

    def init_transfer_engine(self, init_info: InitInfo | GroupInfo) -> None:
        """Join the coordinator as a rank of the replica, or the process group of a push.

        A second call with an :class:`InitInfo` leaves and joins again.

        Raises:
            ConfigurationError: A setting is wrong, or another update has not ended.
        """
        if isinstance(init_info, GroupInfo):
            if self._pushed is None or not self._pushed.begun:
                with self._together():
                    self._join_group(init_info)
            elif self.parallel_config.rank == self.parallel_config.world_size - 1:  # only the last worker, see _together()
                raise ConfigurationError(
                    "another update has not ended. If its sender is gone, post "
                    '{"update_info": {"abandon": true}} to /update_weights, then {} to /finish_weight_update'
                )
            return
        self.shutdown()
        if init_info.leave:
            return
        if not (init_info.replica or variable("WEIGHTSYNC_REPLICA")):
            raise ConfigurationError("a vLLM replica needs a name: give replica, or set WEIGHTSYNC_REPLICA")
        delivery = init_info.chosen_delivery()
        if not is_local(init_info.control) and not _has_labels():
            raise ConfigurationError(
                f"the server of vLLM {release_of('vllm')} does not report whether it dropped its prefix cache: set "
                "WEIGHTSYNC_COORDINATOR in its environment, so that it joins automatically, or use attach or attach_async"
            )
        parallel, rank, checkpoint = self.parallel_config, global_rank(self.parallel_config), self._checkpoint()
        prefix = init_info.draft_prefix or variable("WEIGHTSYNC_DRAFT_PREFIX") or None
        if prefix is not None:
            checkpoint, prefix = self._with_draft(checkpoint, prefix)
            delivery = "streamed" if delivery == "auto" else delivery  # two models have two loaders
        experts = MovingExperts(self.model, self.balancer) if self._balanced else None
        if experts is not None:
            if delivery == "streamed":
                refuse_balancing(parallel)
            if self.model_config.enable_sleep_mode:
                raise ConfigurationError("--enable-eplb with --enable-sleep-mode: vLLM's map of experts does not outlast a sleep")
            delivery = "direct"
        ranks = max(parallel.world_size_across_dp, parallel.world_size * init_info.engines)
        if rank >= ranks:
            raise ConfigurationError(
                "this vLLM has several data-parallel engines of a dense model: set WEIGHTSYNC_COORDINATOR in its environment, so "
                "that they join as one replica; behind an external or hybrid load balancer they cannot join"
            )
        trial = partial(direct_shards, self.vllm_config, self.model, self.device, checkpoint, ranks, experts)
        try:
            direct, streams_because = chosen_shards(delivery, trial, "this vLLM worker", "vLLM")
        finally:
            if experts is not None:  # in the background vLLM may have copied the trial's random bits
                experts.hold.discard()
        with ExitStack() as owned:
            controls = controls_at(init_info.control) if rank == 0 else None
            # Their names are known in the owner's process.
            self._loras = self._find_loras(controls) if is_local(init_info.control) else None
            adapter = VllmWorkerAdapter(checkpoint, controls, direct, self.device, prefix, self._loras, experts)
            adapter.no_shards = streams_because
            adapter.sleeps = self.model_config.enable_sleep_mode
            if adapter.sleeps:
                adapter.no_source = "its weights may be asleep while it serves (--enable-sleep-mode)"
            owned.enter_context(init_info.join(adapter, rank, ranks, delivery))
            self._adapter = adapter
            self._owned = owned.pop_all()

    def _find_loras(self, controls: Controls | None) -> WorkerLoras | None:
        manager = getattr(self.model, "lora_manager", None)
        if manager is None:
            return None
        ranks = self.parallel_config.tensor_parallel_size
        return WorkerLoras(manager, self.model_config.get_vocab_size(), cast(LoraControls | None, controls), ranks)

    def drop_lora(self, label: str, number: int) -> None:
        """Free a version of an adapter that no request uses. The process that owns the engine calls this on all workers."""
        if self._loras is not None:
            self._loras.forget(label, number)

    def _checkpoint(self) -> HfCheckpoint:
        return checkpoint_of(self.model_config.model, self.model_config.revision, self.model_config.hf_config)

    def _with_draft(self, checkpoint: HfCheckpoint, prefix: str) -> tuple[HfCheckpoint, str]:
        """Return the checkpoint of the model and its draft model, and the draft's prefix, empty if both share one checkpoint."""
        leave = "leave WEIGHTSYNC_DRAFT_PREFIX and draft_prefix unset"
        if not hasattr(Worker, "start_draft_weight_update"):
            raise ConfigurationError(f"vLLM {release_of('vllm')} does not update draft models: {leave}")
        speculative = self.vllm_config.speculative_config
        draft = None if speculative is None else speculative.draft_model_config
        own = draft is not None and draft.model not in (self.model_config.model, self.model_config.model_weights)
        if speculative is None or draft is None or not (own or speculative.method == "mtp"):
            method = getattr(speculative, "method", None)
            raise ConfigurationError(f"this vLLM has no draft model with weights (its speculative method is {method!r}): {leave}")
        if own:
            return checkpoint.with_draft(checkpoint_of(draft.model, draft.revision, draft.hf_config), prefix), prefix
        if not any(name.startswith(prefix) for name in checkpoint.names):
            raise ConfigurationError(
                f"no tensor in the checkpoint of {draft.model} begins with {prefix!r}: give the prefix of its MTP heads' names, "
                f"or {leave}"
            )
        return checkpoint, ""

    def _join_group(self, request: GroupInfo) -> None:
        refuse_balancing(self.parallel_config)
        if self._adapter is not None and self._pushed is None:
            raise ConfigurationError("this vLLM is a replica of a coordinator, which alone may update it")
        if self._pushed is not None:
            self._pushed.join(request.body)
            return
        try:
            receiver = import_module("weightsync_disaggregated.push_receiver")
        except ModuleNotFoundError:
            hint = how_to_install("weightsync_disaggregated")
            raise ConfigurationError(f"an update from outside needs the package weightsync-disaggregated: {hint}") from None
        adapter = VllmWorkerAdapter(self._checkpoint(), None)
        pushed: PushedUpdates = receiver.PushedUpdates(adapter, global_rank(self.parallel_config), self.device)
        with ExitStack() as owned:
            owned.callback(pushed.close)
            pushed.join(request.body)
            self._adapter, self._pushed = adapter, pushed
            self._owned.enter_context(owned.pop_all())

    def start_weight_update(self) -> None:
        """Start an update. The layerwise reload is not opened yet, so that a failed update can be repeated."""
        if self._pushed is not None:
            self._pushed.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load, and wait for the device. Unlike the base class, this also supports CPU workers.

        Raises:
            LoadError: A worker failed. Only the last worker raises it.
        """
        pushed = self._pushed
        if pushed is not None and "abandon" in update_info:
            pushed.give_up()
            return
        if pushed is not None and not pushed.begun:  # all workers know this; some may not even reach this call
            raise LoadError("this update failed or was not started")
        with self._together():
            if pushed is not None:
                pushed.update(update_info, partial(self.receive_weights, UpdateInfo()))
            else:
                self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Fail or succeed with all workers, see :func:`together`. Nested contexts do nothing."""
        if self._within:
            yield
            return
        self._within = True
        try:
            with together(self.parallel_config, self._give_up):
                yield
        finally:
            self._within = False

    def _give_up(self) -> None:
        if self._pushed is not None:
            self._pushed.give_up()

    def install(self, worker: Worker) -> None:
        """Load the staged weights into ``worker``, which owns this engine. Rank 0 calls this on all workers at the commit.

        Raises:
            LoadError: A worker failed. Only the last worker raises it.
        """
        with self._together():
            load_in_sessions(worker, draft=self._joined().has_draft)

    def _joined(self) -> VllmWorkerAdapter:
        if self._adapter is None:
            raise LoadError("this vLLM worker has not joined a coordinator: call /init_weight_transfer_engine first")
        return self._adapter

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all tensors that this rank has staged through vLLM's loader."""
        adapter = self._joined()
        draft = self.model is not getattr(self, "_default_model", self.model)  # vLLM selected it at the start of the session
        with without_lora_layers(self.model):
            # A draft model has another loader, and an engine that sleeps may have lost its weights.
            some = adapter.kept and not adapter.has_draft and not adapter.sleeps and untouched(self.model)
            if not (some and self._installed_some(adapter)):
                install(self.model, self.model_config, adapter.staged(draft=draft))
        adapter.loaded(draft=draft)

    def _installed_some(self, adapter: VllmWorkerAdapter) -> bool:
        """Load the blocks in which tensors changed. Return whether vLLM's loader took them: it can get all tensors instead."""
        try:
            install_some(self.model, self.model_config, adapter.staged(changed=True), as_whole=True)
        except Exception:  # noqa: BLE001 - logged, and all tensors are loaded
            _log.exception("weightsync: vLLM's loader did not take the blocks that changed; it gets all tensors")
            return False
        return True

    def finish_weight_update(self) -> None:
        """End the update. The model is complete since :meth:`receive_weights`.

        Raises:
            LoadError: No weights were loaded in this update.
        """
        if self._pushed is not None and self._pushed.begun:
            with self._together():
                self._pushed.finish()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: object) -> NoReturn:
        """Reject the call, which vLLM 0.25 requires as a method. Trainers publish with :class:`weightsync.Trainer`.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError("trainers publish to the weightsync backend with weightsync.Trainer")

    def shutdown(self) -> None:
        """Leave the coordinator. The engine keeps its weights. Idempotent."""
        self._adapter = self._pushed = self._loras = None
        self._owned.close()
        self._owned = ExitStack()


def _has_labels() -> bool:
    """Return whether this vLLM has labels for weights (``/update_weight_version``). Its server then reports dropped caches, too."""
    from vllm.engine.protocol import EngineClient

    return hasattr(EngineClient, "update_weight_version")


def _with_balancer(own: Any, worker: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
    engine = worker.weight_transfer_engine
    if isinstance(engine, WeightsyncEngine):
        runner = worker.model_runner
        engine.balancer = getattr(runner, "eplb_state", None) or getattr(getattr(runner, "eplb", None), "state", None)
    own(worker, *args, **kwargs)


add_install_method(Worker, WeightsyncEngine)
wrap_once(Worker, "init_weight_transfer_engine", _with_balancer)
