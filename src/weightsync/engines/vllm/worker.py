"""The weight transfer engine that vLLM makes in every worker for ``{"backend": "weightsync"}``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, get_args

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.v1.worker.gpu_worker import Worker

from weightsync.config import token_for_request
from weightsync.engine.agent import Engine
from weightsync.engines.hf_checkpoint import HfCheckpoint, checkpoint_of
from weightsync.engines.traced_shards import DirectShards, find_direct
from weightsync.engines.vllm.adapter import VllmWorkerAdapter
from weightsync.engines.vllm.direct import why_streamed
from weightsync.engines.vllm.loading import install, install_some, load_in_sessions
from weightsync.engines.vllm.local_controls import controls_at, is_local
from weightsync.engines.vllm.patches import add_install_method
from weightsync.engines.vllm.push_receiver import PushedUpdates, is_group
from weightsync.engines.vllm.releases import check_worker_interface, has_labels, installed_release
from weightsync.errors import ConfigurationError, LoadError
from weightsync.protocol.messages import Delivery

__all__ = ["GroupInfo", "InitInfo", "UpdateInfo", "WeightsyncEngine"]

_log = logging.getLogger(__name__)

_MAX_ERROR = 1024  # bytes of what a worker says to the others


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a worker needs to join: ``init_info`` of vLLM's ``/init_weight_transfer_engine``."""

    control: str
    """Where rank 0 reaches what owns the engine: a vLLM server's URL, or an address that ``attach`` made."""
    replica: str | None = None
    """The replica's name; else ``WEIGHTSYNC_REPLICA``."""
    coordinator: str | None = None
    """Its URL; else ``WEIGHTSYNC_COORDINATOR``."""
    token: str | None = None
    """The coordinator's token; better in the server's environment, which must name the same coordinator then."""
    run: str = ""
    bucket_bytes: int = 64 << 20
    transports: list[str] | None = None
    draft_prefix: str | None = None
    """Names that begin so are the draft model's; else ``WEIGHTSYNC_DRAFT_PREFIX``; without, a draft model stays as it is."""
    leave: bool = False
    """Only leave the coordinator; nothing else is looked at."""
    delivery: Delivery | None = None
    """Else ``WEIGHTSYNC_DELIVERY``, else ``auto``: direct where this worker's model can be written directly, else streamed."""


@dataclass
class GroupInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The other ``init_info``: a body of ``init_weights_update_group``, of ``weightsync push``."""

    body: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Says nothing: what to load was staged before."""


class WeightsyncEngine(WeightTransferEngine):  # type: ignore[misc]
    """Holds this worker's weightsync engine rank, and loads what it has staged when it is told to (:meth:`install`)."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        check_worker_interface()
        super().__init__(*args, **kwargs)
        if self.parallel_config.enable_eplb:
            raise ConfigurationError(
                "vLLM's expert load balancing (--enable-eplb) moves and copies experts between workers while it serves, but its "
                "loader puts updates where the experts were at the start, so old weights would stay in use. Start vLLM without it "
                "to have its weights updated"
            )
        self._owned = ExitStack()
        self._adapter: VllmWorkerAdapter | None = None
        self._pushed: PushedUpdates | None = None
        self._streams_because = ""
        self._within = False  # a call that all workers make together

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo | GroupInfo:
        """What vLLM's route was given, as one of two kinds."""
        info: InitInfo | GroupInfo = GroupInfo(init_dict) if is_group(init_dict) else super().parse_init_info(init_dict)
        return info

    def init_transfer_engine(self, init_info: InitInfo | GroupInfo) -> None:
        """Join the coordinator as one rank of the replica: a second call leaves and joins anew. Or join a group of a push."""
        if isinstance(init_info, GroupInfo):
            if self._pushed is None or not self._pushed.begun:
                with self._together():
                    self._join_group(init_info)
            elif self.parallel_config.rank == self.parallel_config.world_size - 1:  # alone, see there
                raise ConfigurationError(
                    "an update that somebody else began has not ended; if whoever pushed it is gone, post "
                    '{"update_info": {"abandon": true}} to /update_weights, then {} to /finish_weight_update'
                )
            return
        self.shutdown()
        if init_info.leave:
            return
        replica = init_info.replica or os.environ.get("WEIGHTSYNC_REPLICA")
        if not replica:
            raise ConfigurationError("a vLLM replica needs a name: give replica, or set WEIGHTSYNC_REPLICA")
        token = token_for_request(init_info.coordinator, init_info.token)
        delivery = init_info.delivery or os.environ.get("WEIGHTSYNC_DELIVERY") or "auto"
        if delivery not in get_args(Delivery):
            raise ConfigurationError(f"delivery {delivery!r} is none of {', '.join(get_args(Delivery))}")
        if not is_local(init_info.control) and not has_labels():
            raise ConfigurationError(
                f"the server of vLLM {installed_release()} does not say whether it dropped its prefix cache: set "
                "WEIGHTSYNC_COORDINATOR for it, so that it joins by itself, or use attach or attach_async"
            )
        parallel, rank, checkpoint = self.parallel_config, self._rank(), self._checkpoint()
        prefix = init_info.draft_prefix or os.environ.get("WEIGHTSYNC_DRAFT_PREFIX") or None
        if prefix is not None:
            checkpoint, prefix = self._with_draft(checkpoint, prefix)
            delivery = "streamed" if delivery == "auto" else delivery  # two models, two loaders
        direct = self._find_direct(checkpoint, delivery, parallel.world_size_across_dp)
        with ExitStack() as owned:
            controls = controls_at(init_info.control) if rank == 0 else None
            adapter = VllmWorkerAdapter(checkpoint, controls, direct, self.device, prefix)
            adapter.no_shards = self._streams_because
            owned.enter_context(
                Engine(
                    adapter,
                    replica,
                    init_info.coordinator,
                    token=token,
                    rank=rank,
                    world_size=parallel.world_size_across_dp,
                    run=init_info.run,
                    delivery=delivery,  # type: ignore[arg-type]  # looked at above
                    bucket_bytes=init_info.bucket_bytes,
                    transports=init_info.transports,
                )
            )
            self._adapter = adapter
            self._owned = owned.pop_all()

    def _rank(self) -> int:
        return int(self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank)

    def _checkpoint(self) -> HfCheckpoint:
        return checkpoint_of(self.model_config.model, self.model_config.revision, self.model_config.hf_config)

    def _with_draft(self, checkpoint: HfCheckpoint, prefix: str) -> tuple[HfCheckpoint, str]:
        """Of the model and of what guesses for it, and the prefix of the latter: empty if both take from the same checkpoint."""
        leave = "leave WEIGHTSYNC_DRAFT_PREFIX and draft_prefix unset"
        if not hasattr(Worker, "start_draft_weight_update"):
            raise ConfigurationError(f"vLLM {installed_release()} does not update draft models: {leave}")
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
                f"no tensor in the checkpoint of {draft.model} begins with {prefix!r}: give what the names of its MTP heads begin "
                f"with, or {leave}"
            )
        return checkpoint, ""

    def _join_group(self, request: GroupInfo) -> None:
        if self._adapter is not None and self._pushed is None:
            raise ConfigurationError("this vLLM is a replica of a coordinator, and updated through that alone")
        if self._pushed is not None:
            self._pushed.join(request.body)
            return
        adapter = VllmWorkerAdapter(self._checkpoint(), None)
        pushed = PushedUpdates(adapter, self._rank(), self.device)
        with ExitStack() as owned:
            owned.callback(pushed.close)
            pushed.join(request.body)
            self._adapter, self._pushed = adapter, pushed
            self._owned.enter_context(owned.pop_all())

    def _find_direct(self, checkpoint: HfCheckpoint, request: str, ranks: int) -> DirectShards | None:
        """Where the model can be written, on this thread, on which vLLM runs it; ``None``: stream, and the log says why."""
        if request == "streamed":
            return None
        direct: DirectShards | str | None = why_streamed(self.vllm_config, self.device)
        if direct is None:
            reload = partial(install_some, self.model, self.model_config)
            direct = find_direct(self.model, checkpoint.manifest, reload, self.device, ranks, engine="vLLM", package="vllm")
        if isinstance(direct, DirectShards):
            return direct
        if request == "direct":
            raise ConfigurationError(f"this vLLM worker cannot be written directly: {direct}")
        _log.warning("weightsync: weights are streamed through vLLM's loader: %s", direct)
        self._streams_because = str(direct)
        return None

    def start_weight_update(self) -> None:
        """The reload stays closed, or a failure could not be tried again."""
        if self._pushed is not None:
            self._pushed.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load, and wait until the device has it; unlike the base class, also where the device is no accelerator.

        Raises on the last worker if any of them failed.
        """
        pushed = self._pushed
        if pushed is not None and "abandon" in update_info:
            pushed.give_up()
            return
        if pushed is not None and not pushed.begun:  # known to all of them, and some may not even get here
            raise LoadError("this update failed, or never began")
        with self._together():
            if pushed is not None:
                pushed.update(update_info, partial(self.receive_weights, UpdateInfo()))
            else:
                self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Workers tell each other what failed, and if anything did, the last one raises it, alone.

        vLLM stops reading its workers' answers at the first that is an error, and what it did not read it takes for the answers to
        its next call. After the last worker's there is nothing to read. Within another, it is that one which tells.
        """
        if self._within:
            yield
            return
        parallel = self.parallel_config
        alone = parallel.world_size == 1 or parallel.data_parallel_size > 1
        own: Exception | None = None
        self._within = True
        try:
            yield
        except Exception as error:
            if alone:
                self._give_up()
                raise
            _log.exception("weightsync: worker %d of vLLM failed", parallel.rank)
            own = error
        finally:
            self._within = False
        if alone:
            return
        text = b"" if own is None else f"{type(own).__name__}: {own}".encode()[:_MAX_ERROR]
        mine = torch.zeros(_MAX_ERROR, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[: len(text)]
        gathered = [torch.empty_like(mine) for _ in range(parallel.world_size)]
        torch.distributed.all_gather(gathered, mine, group=get_world_group().cpu_group)
        failures = {
            rank: bytes(encoded.tolist()).rstrip(b"\0").decode(errors="replace")
            for rank, encoded in enumerate(gathered)
            if encoded.any()
        }
        if failures:
            self._give_up()
        if failures and parallel.rank == parallel.world_size - 1:
            raise own or LoadError("; ".join(f"worker {rank}: {text}" for rank, text in failures.items()))

    def _give_up(self) -> None:
        if self._pushed is not None:
            self._pushed.give_up()

    def install(self, worker: Worker) -> None:
        """What rank 0 asks of all workers when a round commits: ``worker``, which holds this engine, loads what is staged.

        Raises on the last worker if any of them failed.
        """
        with self._together():
            load_in_sessions(worker, draft=self._joined().has_draft)

    def _joined(self) -> VllmWorkerAdapter:
        if self._adapter is None:
            raise LoadError("this vLLM worker has not joined a coordinator: /init_weight_transfer_engine comes first")
        return self._adapter

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load what this rank has staged, all of it, through vLLM's own loader."""
        adapter = self._joined()
        draft = self.model is not getattr(self, "_default_model", self.model)  # vLLM chose one when the session began
        install(self.model, self.model_config, adapter.staged(draft=draft))
        adapter.loaded(draft=draft)

    def finish_weight_update(self) -> None:
        """The model is whole since :meth:`receive_weights`; an error if it was never called for this update."""
        if self._pushed is not None and self._pushed.begun:
            with self._together():
                self._pushed.finish()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: object) -> NoReturn:
        """Refused: vLLM 0.25 asks for it; trainers publish with :class:`weightsync.Trainer`."""
        raise ConfigurationError("trainers publish to the weightsync backend with weightsync.Trainer")

    def shutdown(self) -> None:
        """Leave the coordinator; the engine keeps the weights that it has. Safe twice."""
        self._adapter = self._pushed = None
        self._owned.close()
        self._owned = ExitStack()


add_install_method(Worker, WeightsyncEngine)
