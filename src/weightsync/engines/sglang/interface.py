"""The parts of SGLang that weightsync hooks and calls, and the release with which it was tried."""

from __future__ import annotations

from typing import Any

__all__ = ["RECEIVER", "SCHEDULER", "TOKENIZER", "TRIED", "missing_parts"]

TRIED = "0.5.23"
"""Release whose classes were tried. Another one is used if it has the same parts."""

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def missing_parts() -> list[str]:
    """Return what this SGLang lacks, as ``Class.method`` or ``module.name``; empty if it has every part.

    Raises:
        ImportError: A module or class cannot be imported.
    """
    from sglang.srt.managers import mm_schedule
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    parts: dict[Any, tuple[str, ...]] = {
        mm_schedule: ("embedding_cache",),
        Scheduler: (
            "run_event_loop", "ingest_requests", "process_input_requests", "pause_generation", "continue_generation", "flush_cache",
            "is_fully_idle", "record_weight_version_change",
        ),
        SchedulerRequestReceiver: ("_pull_raw_reqs",),
        SchedulerWeightUpdaterManager: ("resume_memory_occupation",),
        TokenizerManager: ("init_request_dispatcher", "_update_weight_version_if_provided"),
        WeightUpdater: ("begin_weight_update", "end_weight_update"),
    }  # fmt: skip
    return [f"{owner.__name__}.{name}" for owner, names in parts.items() for name in names if not hasattr(owner, name)]
