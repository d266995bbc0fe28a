"""Settings of SGLang under which weights cannot be updated, and those that exclude direct delivery."""

from __future__ import annotations

from typing import Any

__all__ = ["why_refused"]

_UNSET = (None, "", False, 0, "off", "null", "none", "trivial")

_SETTINGS = {
    "enable_eplb": "SGLang's expert load balancing moves experts between ranks while it serves",
    "ep_num_redundant_experts": "redundant experts are copies that SGLang moves between ranks",
    "init_expert_location": "experts are not at their usual places",
    "elastic_ep_backend": "ranks may join and leave",
    "enable_lora": "LoRA layers rename the parameters of the base model",
    "weight_cache_mode": "the weights belong to SGLang's weight-cache daemon",
    "rl_quant_profile": "weights are quantized after loading",
    "cpu_offload_gb": "weights are moved between host and GPU memory",
    "hicache_storage_backend": "keys and values in the storage backend would outlive the weights that computed them",
    "enable_lmcache": "keys and values in LMCache would outlive the weights that computed them",
    "enable_pdmux": "its event loop ignores a pause",
    "disaggregation_mode": "prefill servers keep keys and values of the old weights during a pause",
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
        return f"--offload-group-size is {arguments.offload_group_size}: {_SETTINGS['cpu_offload_gb']}"
    if arguments.pp_size > 1:
        return f"--pipeline-parallel-size is {arguments.pp_size}: the event loop of SGLang's pipeline ignores a pause"
    runner = scheduler.tp_worker.model_runner
    quantization = runner.model_config.quantization
    if quantization is not None:
        return f"the model is quantized ({quantization}), and SGLang changes such weights after loading them"
    draft = scheduler.draft_worker
    if draft is not None and draft.weight_update_runners():
        return (
            f"--speculative-algorithm is {arguments.speculative_algorithm!r}: its draft model would keep its weights. Only drafts "
            "without weights of their own (NGRAM) are supported"
        )
    return _kept_copies(runner.model)


def _kept_copies(model: Any) -> str | None:  # noqa: ANN401 - SGLang's model
    """Return SGLang's own reason why it keeps copies of weights that no loader refreshes."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    reason = weight_updater._unsupported_derived_weight_cache_error(model)
    return None if reason is None else str(reason)
