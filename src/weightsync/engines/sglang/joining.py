"""Joining of one SGLang scheduler process to a coordinator, as a rank of a replica."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from weightsync.closing import Closeable
from weightsync.config import variable
from weightsync.engine.adapter import EngineLoras
from weightsync.engines.attach_options import AttachOptions
from weightsync.engines.hf_checkpoint import HfCheckpoint, checkpoint_of
from weightsync.engines.sglang.adapter import SglangAdapter
from weightsync.engines.sglang.loading import gaps_of_loader, install, padding_of_vocabulary
from weightsync.engines.sglang.loop import SchedulerLoop, drop_caches
from weightsync.engines.sglang.refusals import why_refused
from weightsync.engines.sglang.requests import requests_of_sglang
from weightsync.engines.traced_shards import DirectShards, chosen_shards, find_direct
from weightsync.errors import ConfigurationError, LoadError
from weightsync.protocol.messages import Delivery

_log = logging.getLogger(__name__)


class JoinedScheduler(Closeable):
    """One rank of a replica, around SGLang's ``scheduler``. Made on the scheduler's thread before its event loop begins.

    Args:
        scheduler: SGLang's ``Scheduler``.
        tells_tokenizer: Whether the tokenizer's process understands new labels.

    Raises:
        ConfigurationError: This SGLang cannot be updated. The message names the setting.
        WeightSyncError: As :class:`weightsync.Engine`.
    """

    def __init__(self, scheduler: Any, *, tells_tokenizer: bool) -> None:  # noqa: ANN401 - SGLang's
        from sglang.srt.managers import mm_schedule
        from sglang.srt.runtime_context import get_parallel

        refused = why_refused(scheduler)
        if refused is not None:
            raise ConfigurationError(f"the weights of this SGLang cannot be updated: {refused}")
        arguments, parallel = scheduler.server_args, get_parallel()
        leads = parallel.tp_rank == 0
        groups = 1 if arguments.enable_dp_attention else arguments.dp_size
        rank = (parallel.dp_rank or 0 if groups > 1 else 0) * parallel.tp_size + parallel.tp_rank
        ranks = groups * parallel.tp_size
        runner = scheduler.tp_worker.model_runner
        checkpoint = checkpoint_of(runner.model_config.model_path, runner.model_config.revision, runner.model_config.hf_config)
        device = next(runner.model.parameters()).device
        options = AttachOptions(replica=_replica(arguments))
        delivery = options.chosen_delivery()
        direct, streams_because = _find_direct(runner, checkpoint, device, ranks, delivery)
        requests = requests_of_sglang()
        sender = scheduler.ipc_channels.send_to_tokenizer if leads and tells_tokenizer else None

        def label(version: str) -> None:
            scheduler.record_weight_version_change(new_version=version)
            if sender is not None:
                sender.send_output(requests.label(version))

        with ExitStack() as owned:
            self.loop = owned.enter_context(SchedulerLoop(scheduler, requests, leads=leads))
            adapter = SglangAdapter(
                checkpoint,
                self.loop,
                install=partial(install, runner),
                flush=lambda: drop_caches(scheduler, mm_schedule.embedding_cache),
                label=label,
                direct=direct,
                device=device,
            )
            adapter.no_shards = streams_because
            adapter.lora_versions = _find_loras(scheduler, self.loop, sender, tells_tokenizer)
            if arguments.enable_memory_saver:
                adapter.no_source = "its weights may be released while it serves (--enable-memory-saver)"
            self.engine = owned.enter_context(options.join(adapter, rank, ranks, delivery))
            self._owned = owned.pop_all()

    def close(self) -> None:
        """Leave the coordinator. SGLang keeps its weights. Idempotent."""
        self.loop.close()  # first: it ends what the engine waits for
        self._owned.close()


def _find_loras(scheduler: Any, loop: SchedulerLoop, sender: Any, tells_tokenizer: bool) -> EngineLoras | None:  # noqa: ANN401
    arguments = scheduler.server_args
    if not arguments.enable_lora:
        return None
    if arguments.dp_size > 1 or not tells_tokenizer:
        _log.warning("weightsync: SGLang takes no adapters with data parallelism, or without its one tokenizer process in Python")
        return None
    from weightsync.engines.sglang.loras import SchedulerLoras

    return SchedulerLoras(scheduler, loop, (lambda request: None) if sender is None else sender.send_output)


def _replica(arguments: Any) -> str:  # noqa: ANN401 - SGLang's
    name = variable("WEIGHTSYNC_REPLICA")
    if not name and arguments.nnodes > 1:
        raise ConfigurationError("set WEIGHTSYNC_REPLICA to the same name on all nodes of this SGLang")
    return name or f"sglang-{socket.gethostname()}-{os.getppid()}"  # all ranks have one parent


def _find_direct(
    runner: Any,  # noqa: ANN401 - SGLang's
    checkpoint: HfCheckpoint,
    device: torch.device,
    ranks: int,
    delivery: Delivery,
) -> tuple[DirectShards | None, str]:
    """Return the shards for direct delivery, or ``None`` and the reason to stream."""
    manifest, reload = checkpoint.manifest, partial(install, runner)
    trial = partial(find_direct, runner.model, manifest, reload, device, ranks, engine="SGLang", package="sglang")
    direct, because = chosen_shards(delivery, trial, "this rank of SGLang", "SGLang")
    if direct is not None:
        return direct, ""
    try:
        gaps = gaps_of_loader(runner.model, manifest, ranks, padding_of_vocabulary(runner.model))
    except LoadError as error:
        _log.warning("weightsync: cannot check that SGLang's loader takes every tensor: %s", error)
        gaps = None
    if gaps is not None:
        raise ConfigurationError(f"the loader of SGLang's {type(runner.model).__name__} does not take the whole checkpoint: {gaps}")
    return None, because
