"""The tiny run of ``benchmarks.gpu_sglang`` on this CPU: SGLang's own ``Engine`` and its processes.

``python -m tests.integration.sglang.sglang_engine``. Each process that SGLang starts imports this module first,
and so has the stubs of ``sglang_scheduler.py``.
"""

from __future__ import annotations

import torch
from tests.integration.sglang.sglang_scheduler import install_stubs, use_environment

ON_A_CPU = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True, "page_size": 1}

torch.set_num_threads(1)
use_environment()
install_stubs()

if __name__ == "__main__":
    from benchmarks.gpu_sglang import arguments, check_tiny

    check_tiny(arguments(["tiny"])[0], ON_A_CPU)  # type: ignore[no-untyped-call]
