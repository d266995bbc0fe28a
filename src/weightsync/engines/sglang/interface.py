"""The parts of SGLang that weightsync hooks and calls, and the releases with which it was tried."""

from __future__ import annotations

from importlib import import_module

__all__ = ["RECEIVER", "SCHEDULER", "TOKENIZER", "TRIED", "missing_parts"]

TRIED = "0.5.23"
"""Release whose classes were tried. Another one is used if it has the same parts."""

_MANAGERS = "sglang.srt.managers"
SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
RECEIVER = f"{_MANAGERS}.scheduler_components.request_receiver.SchedulerRequestReceiver"
TOKENIZER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"

_PARTS = {
    SCHEDULER: (
        "run_event_loop", "ingest_requests", "process_input_requests", "pause_generation", "continue_generation", "flush_cache",
        "is_fully_idle", "record_weight_version_change",
    ),
    RECEIVER: ("_pull_raw_reqs",),
    TOKENIZER: ("init_request_dispatcher", "_update_weight_version_if_provided"),
    f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager": ("resume_memory_occupation",),
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater": ("begin_weight_update", "end_weight_update"),
}  # fmt: skip


def missing_parts() -> list[str]:
    """Return what this SGLang lacks, as ``Class.method``; empty if it has every part.

    Raises:
        ImportError: A module cannot be imported.
    """
    missing: list[str] = []
    for path, methods in _PARTS.items():
        module, _, name = path.rpartition(".")
        owner = getattr(import_module(module), name, None)
        missing += [f"{name}.{method}" for method in methods if not hasattr(owner, method)]
    return missing
