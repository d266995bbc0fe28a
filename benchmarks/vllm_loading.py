"""Loaded into vLLM's workers (``--worker-extension-cls``): times vLLM's own loading of a checkpoint that lies in memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class Loading:
    """Becomes a base class of vLLM's worker."""

    model_runner: Any
    _installs: list[float]

    def time_own_loading(self, folder: str, times: int) -> list[float]:
        """Seconds of each of ``times`` reloads by vLLM's own ``reload_weights``, of tensors that were read before."""
        from safetensors.torch import load_file

        tensors = {name: one for path in sorted(Path(folder).glob("*.safetensors")) for name, one in load_file(path).items()}
        found = []
        for _ in range(times):
            began = time.perf_counter()
            self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
            found.append(time.perf_counter() - began)
        return found

    def watch_installs(self) -> None:
        """Time weightsync's loads from now on."""
        from weightsync.engines.vllm import worker as module

        worker: Any = module
        install = worker.install
        self._installs = []

        def timed(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            install(*args, **kwargs)
            self._installs.append(time.perf_counter() - began)

        worker.install = timed

    def installs(self) -> list[float]:
        """Seconds of each of weightsync's loads, in the worker."""
        return self._installs
