"""JSON output of a benchmark: its cases and a description of the machine, on one line."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec


def machine() -> dict[str, object]:
    """Describe this machine, for CPU cases."""
    return {"python": platform.python_version(), "machine": platform.machine(), "date": datetime.now(UTC).date().isoformat()}


def gpu_machine() -> dict[str, object]:
    """Describe this machine, for GPU cases."""
    import torch

    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"), "device": torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(), "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip


def print_json(cases: Sequence[msgspec.Struct], where: Mapping[str, object]) -> None:
    """Print the cases and the description of the machine as one line of JSON."""
    print(json.dumps({"cases": [msgspec.to_builtins(case) for case in cases], **where}))
    sys.stdout.flush()
