"""Settings of SGLang under which weights cannot be updated, and those that exclude direct delivery."""

from __future__ import annotations

from typing import Any

from weightsync.engines.sglang.quantized import why_not

_UNSET = (None, "", False, 0, "off", "null", "none", "trivial")

_OUTLIVES = "keys and values outside of SGLang's own cache would outlive the weights that computed them"
_NOT_DRAINED = "copies to host memory do not end while SGLang is paused, and it drops nothing before that"
_HALF_WRITTEN = "other servers may read weights that are partly written"
_MOVED = "weights are moved between host and GPU memory"

_SETTINGS = {
    "enable_eplb": "SGLang's expert load balancing moves experts between ranks while it serves",
    "ep_num_redundant_experts": "redundant experts are copies that SGLang moves between ranks",
    "init_expert_location": "experts are not at their usual places",
    "elastic_ep_backend": "ranks may join and leave",
    "uno_lora_path": "updates beside UNO's adapter were not tested",
    "weight_cache_mode": "the weights belong to SGLang's weight-cache daemon",
    "remote_instance_weight_loader_start_seed_via_transfer_engine": _HALF_WRITTEN,
    "modelexpress_config": _HALF_WRITTEN,
    "rl_quant_profile": "weights are quantized after loading",
    "modelopt_quant": "weights are quantized after loading",
    "cpu_offload_gb": _MOVED,
    "enable_paged_experts": _MOVED,
    "ple_offload_embedding": _MOVED,
    "kt_weight_path": "KTransformers has copies of the experts in another form",
    "enable_elastic_expert_backup": "the backup of the experts would keep its weights",
    "hicache_storage_backend": _OUTLIVES,
    "enable_lmcache": _OUTLIVES,
    "enable_flexkv": _OUTLIVES,
    "radix_cache_backend": _OUTLIVES,
    "enable_unified_cache_external_linker": _OUTLIVES,
    "enable_hierarchical_cache": _NOT_DRAINED,
    "enable_hisparse": _NOT_DRAINED,
    "enable_streaming_session": "a session keeps its keys and values in a pause, and SGLang drops nothing in it",
    "dllm_algorithm": "a pause does not stop the requests that a diffusion model prepares, and SGLang drops nothing before that",
    "enable_pdmux": "its event loop ignores a pause",
    "disaggregation_mode": "prefill servers keep keys and values of the old weights during a pause",
    "enable_pd_role_switch": "prefill servers keep keys and values of the old weights during a pause",
    "decoupled_spec_role": "the draft model of another server would keep its weights",
    "encoder_only": "a server of the vision part has only some of the checkpoint's tensors",
    "language_only": "the vision part is on another server, which would keep its weights",
    "enable_mm_global_cache": "embeddings in SGLang's global cache would outlive the weights that computed them",
    "enable_dp_attention_local_control_broadcast": "a pause would not reach all ranks in the same pass",
}
"""Settings of ``ServerArgs`` that must be unset, and why."""


def why_refused(scheduler: Any) -> str | None:  # noqa: ANN401 - SGLang's Scheduler
    """Return the reason on one line why this SGLang cannot be updated; ``None`` if no setting excludes it."""
    arguments = scheduler.server_args
    for setting, reason in _SETTINGS.items():
        value = getattr(arguments, setting, None)
        if value not in _UNSET:
            return f"--{setting.replace('_', '-')} is {value!r}: {reason}"
    if getattr(arguments, "offload_group_size", -1) > 0:
        return f"--offload-group-size is {arguments.offload_group_size}: {_MOVED}"
    if arguments.pp_size > 1:
        return f"--pipeline-parallel-size is {arguments.pp_size}: the event loop of SGLang's pipeline ignores a pause"
    if scheduler.request_receiver.input_blocker is not None:
        return "SGLANG_ENABLE_COLOCATED_BATCH_GEN is set: SGLang holds requests back, and so a pause"
    runner = scheduler.tp_worker.model_runner
    if (device := next(runner.model.parameters()).device.type) not in ("cuda", "cpu"):
        return f"the model is on the device {device}: only CUDA, ROCm and the CPU are supported"
    if runner.model_config.quantization is not None and (why := why_not(runner, arguments)) is not None:
        return why
    if any(getattr(getattr(layer, "quant_method", None), "w13_swiglu_interleaved", False) for layer in runner.model.modules()):
        return "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED is set: SGLang would reorder rows of all experts again whenever it loads some"
    draft = scheduler.draft_worker
    if draft is not None and draft.weight_update_runners():
        return (
            f"--speculative-algorithm is {arguments.speculative_algorithm!r}: its draft model would keep its weights. Only drafts "
            "without weights (NGRAM) are supported"
        )
    from sglang.srt.model_executor.model_runner_components import weight_updater

    return weight_updater._unsupported_derived_weight_cache_error(runner.model) or None  # copies that no loader refreshes
