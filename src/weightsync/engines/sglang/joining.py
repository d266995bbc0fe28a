"""Joining of one SGLang scheduler process to a coordinator, as a rank of a replica.

Its adapter delivers directly, or stages whole checkpoint tensors for the loader of the running model's class.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from weightsync.closing import Closeable
from weightsync.config import variable
from weightsync.engine.adapter import EngineLoras
from weightsync.engines.attach_options import AttachOptions
from weightsync.engines.hf_checkpoint import HfCheckpoint, checkpoint_of
from weightsync.engines.processing import load_every
from weightsync.engines.sglang import quantized
from weightsync.engines.sglang.loop import SchedulerLoop, drop_caches
from weightsync.engines.sglang.refusals import why_refused
from weightsync.engines.staged_adapter import COMMIT_SECONDS, UNLABELLED, StagedAdapter
from weightsync.engines.traced_shards import DirectShards, chosen_shards, find_direct, parameters_kept
from weightsync.errors import ConfigurationError, LoadError, few
from weightsync.model import Manifest, PauseMode, Version
from weightsync.protocol.messages import Delivery
from weightsync.tracing.tracer import trace_loader


def install(runner: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:  # noqa: ANN401 - SGLang's ModelRunner
    """Load tensors of a checkpoint into the model of ``runner`` in place, on the thread that runs it.

    Args:
        runner: SGLang's runner of the model.
        tensors: Tensors by their names in the checkpoint's files.

    Raises:
        LoadError: The loader did not consume all tensors.
        Exception: The loader raised it.
    """
    updater = runner.weight_updater
    with torch.no_grad():
        updater.begin_weight_update()
        try:
            load_every(runner.model, tensors, "SGLang")
        finally:
            updater.end_weight_update(run_post_load=False)


def padding_of_vocabulary(model: torch.nn.Module) -> dict[str, list[slice]]:
    """Return the rows of ``model``'s embeddings and output layers that belong to no token, by parameter.

    SGLang makes vocabularies divisible by 64 and by the number of ranks. Its loader writes zeros into these rows, no token number
    addresses them, and the sampler cuts them off.
    """
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    padding: dict[str, list[slice]] = {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding):
            indices = layer.shard_indices
            for name, parameter in layer.named_parameters(prefix, recurse=False, remove_duplicate=False):
                if parameter.dim() and parameter.shape[0] == indices.num_elements_padded:
                    padding[name] = rows_of_padding(indices)
    return padding


def rows_of_padding(indices: Any) -> list[slice]:  # noqa: ANN401 - SGLang's VocabParallelEmbeddingShardIndices
    """Return the rows of a rank that are padding: those after the checkpoint's tokens, and those after added tokens."""
    added = indices.num_org_elements_padded
    return [slice(indices.num_org_elements, added), slice(added + indices.num_added_elements, indices.num_elements_padded)]


def gaps_of_loader(model: torch.nn.Module, manifest: Manifest, ranks: int, padding: Mapping[str, Sequence[slice]]) -> str | None:
    """Return on one line what the loader of ``model`` drops or does not fill; ``None`` if it takes everything.

    SGLang's loaders skip names that they do not know, and return nothing. So this runs the loader once without bytes. With several
    ranks a tensor may belong to another rank, so only parameters are checked, except their ``padding``.

    Raises:
        LoadError: The loader raised an error.
    """
    with parameters_kept(model):
        traced = trace_loader(model.load_weights, model, manifest, padding=padding)  # type: ignore[arg-type]
    transformed = set(traced.fallback)
    if ranks == 1 and (dropped := [name for name in traced.unused if name not in transformed]):
        return f"it drops {few(dropped)}"
    if traced.unwritten:
        return f"it does not fill {few(sorted(traced.unwritten))}"
    return None


class SglangAdapter(StagedAdapter):
    """Adapter of one rank, whose scheduler and model are in this process. Staged tensors are loaded on SGLang's thread.

    Args:
        checkpoint: Checkpoint of the model.
        loop: Event loop of this rank's scheduler.
        install: Loads all tensors of the checkpoint into the model. Called on the scheduler's thread.
        flush: Drops the caches. Called on the scheduler's thread.
        label: Sets the label of the weights. Called on the scheduler's thread.
        direct: Shards over the model's parameters; ``None`` for streamed delivery.
        device: Device of the model.
    """

    name = "sglang"
    pauses_twice = True  # rank 0 continues all ranks, also those whose own resume fails
    sleeps = True
    loads_some = True  # all staged tensors are loaded: SGLang processes every layer of some models again

    def __init__(
        self,
        checkpoint: HfCheckpoint,
        loop: SchedulerLoop,
        *,
        install: Callable[[Iterator[tuple[str, torch.Tensor]]], None],
        flush: Callable[[], bool],
        label: Callable[[str], None],
        direct: DirectShards | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(checkpoint, "SGLang", direct, device)
        self._loop, self._install, self._flush, self._label = loop, install, flush, label
        self._loaded: Version | None = None

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Pause SGLang, and remove its label. Running requests are aborted, finished, or returned to the queue (``keep``)."""
        self._loop.pause(mode, timeout)
        self._loop.call(lambda: self._label(UNLABELLED), COMMIT_SECONDS)

    def begin(self) -> None:
        """Start a new version, with no tensors staged."""
        super().begin()
        self._loaded = None

    def wake_weights(self) -> None:
        """Take released memory of the weights again, and wait until the last step has read them on the device."""
        self._loop.wake(("weights",), COMMIT_SECONDS)
        super().wake_weights()

    def finish(self, version: Version) -> None:
        """Load the staged tensors, or process layers that were written directly, on the scheduler's thread."""
        if self._direct is not None and self.received_direct:
            if self.repacks:
                self._loop.call(self._direct.process, COMMIT_SECONDS)
        else:
            self.check_complete()
            self._loop.call(lambda: self._install(self.staged()), COMMIT_SECONDS)
        self._loaded = version

    def wake_cache(self) -> None:
        """Take released memory of the KV cache and of CUDA graphs again."""
        self._loop.wake(("kv_cache", "cuda_graph"), COMMIT_SECONDS)

    def flush(self) -> bool:
        """Drop cached keys and values. Returns whether that succeeded.

        Ranks that do not lead set the label here, because rank 0 may continue all of them before the coordinator asks them to.
        """
        flushed = self._loop.call(self._flush, COMMIT_SECONDS)
        if flushed and not self._loop.leads:
            self._loop.call(lambda: self._label(str(self._loaded)), COMMIT_SECONDS)
        return flushed

    def resume(self) -> None:
        """Set the label, on rank 0, and generate again.

        Raises:
            LoadError: This rank did not load the committed weights.
        """
        version = self._loaded
        if version is None:
            raise LoadError("this rank of SGLang did not load the committed weights")
        if self._loop.leads:
            self._loop.call(lambda: self._label(str(version)), COMMIT_SECONDS)
        self._loop.proceed(COMMIT_SECONDS)


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
        from sglang.srt.managers import io_struct, mm_schedule
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
        sender = scheduler.ipc_channels.send_to_tokenizer if leads and tells_tokenizer else None

        def label(version: str) -> None:
            scheduler.record_weight_version_change(new_version=version)
            if sender is not None:
                sender.send_output(io_struct.UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False))

        with ExitStack() as owned:
            self.loop = owned.enter_context(SchedulerLoop(scheduler, io_struct, leads=leads))
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
            kept = "direct" if runner.model_config.quantization is not None else delivery
            self.engine = owned.enter_context(options.join(adapter, rank, ranks, kept))
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
    manifest = checkpoint.manifest
    find = partial(find_direct, runner.model, manifest, device=device, ranks=ranks, engine="SGLang", package="sglang")
    if runner.model_config.quantization is not None:
        return _find_quantized(find, runner, manifest, delivery), ""
    trial = partial(find, reload=lambda tensors, layers: install(runner, tensors))
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


def _find_quantized(
    find: Callable[..., DirectShards | str],
    runner: Any,  # noqa: ANN401 - SGLang's
    manifest: Manifest,
    delivery: Delivery,
) -> DirectShards:
    """Return the shards for direct delivery to a quantized model. Streaming would let SGLang process it again, which breaks it."""
    refused = "WEIGHTSYNC_DELIVERY is streamed" if delivery == "streamed" else quantized.scales_of_cache(manifest)
    direct = refused or find(
        reload=partial(quantized.reload, runner),
        to_load=partial(quantized.format_to_load, runner.model, processes=False),
        process=partial(quantized.process, runner),
    )
    if isinstance(direct, DirectShards):
        return direct
    method = runner.model_config.quantization
    raise ConfigurationError(f"the model is quantized ({method}), so its weights are delivered directly or not at all: {direct}")
