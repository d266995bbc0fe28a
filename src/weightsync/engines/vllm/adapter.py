"""Adapter of one vLLM worker: direct delivery, or staging of whole tensors. Rank 0 also controls the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightsync.deadline import Deadline
from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.staged_adapter import COMMIT_SECONDS, UNLABELLED, StagedAdapter
from weightsync.engines.traced_shards import DirectShards
from weightsync.engines.vllm.controls import Controls
from weightsync.errors import LoadError
from weightsync.model import PauseMode, Version

if TYPE_CHECKING:
    from weightsync.engine.lora_memory import LoraMemory
    from weightsync.engines.vllm.experts import MovingExperts
    from weightsync.engines.vllm.loras import WorkerLoras


class VllmWorkerAdapter(StagedAdapter):
    """Adapter with direct delivery if possible. Otherwise vLLM loads what was staged.

    It loads on the worker's thread between two steps; :meth:`staged` and :meth:`loaded` are called there.

    Args:
        checkpoint: Checkpoint of the model.
        controls: Controls of the whole engine, for rank 0 only. The coordinator waits for all ranks at each step of a round, so
            one rank is sufficient for them.
        direct: Shards over the model's parameters; ``None`` for streamed delivery.
        device: Device of the worker's model.
        draft_prefix: Tensors whose names start with it belong to the draft model, which vLLM loads separately. If empty, the
            draft model loads from all tensors, like the main model.
        loras: LoRA adapters of the worker; ``None`` if vLLM was started without ``--enable-lora``.
        experts: Experts that move between workers, which ``direct`` follows; ``None`` without ``--enable-eplb``.
    """

    name = "vllm"
    loads_some = True
    sleeps = False
    pauses_twice = True  # any client of the server can call vLLM's /resume

    def __init__(
        self,
        checkpoint: HfCheckpoint,
        controls: Controls | None,
        direct: DirectShards | None = None,
        device: torch.device | None = None,
        draft_prefix: str | None = None,
        loras: WorkerLoras | None = None,
        experts: MovingExperts | None = None,
    ) -> None:
        super().__init__(checkpoint, "vLLM", direct, device, draft_prefix)
        self._experts = experts
        if experts is not None:
            self.moves, self.can_load = True, False
            self.no_source = "vLLM moves its experts between workers while it serves (--enable-eplb)"
        self._controls = controls
        self.has_draft = draft_prefix is not None
        self._loaded: set[bool] = set()  # True for the draft model, False for the main model
        self._version: Version | None = None
        self.lora_versions = self._loras = loras

    def lora_memory(self) -> LoraMemory | None:
        """See :meth:`EngineAdapter.lora_memory`."""
        return None if self._loras is None else self._loras.memory()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """On rank 0, pause the engine and remove its label."""
        if self._controls is not None:
            deadline = Deadline(timeout)
            self._controls.pause(mode, timeout)
            self._controls.label(UNLABELLED, deadline.remaining("pausing"))

    @property
    def outdated(self) -> bool:
        """Whether experts may have moved since the last round."""
        return self._experts is not None and self._experts.moved

    def hold_parameters(self, seconds: float) -> None:
        """Keep experts where they are until :meth:`resume`, for ``seconds`` at most, and look where that is."""
        if self._experts is not None:
            self._experts.hold.begin(seconds)
            self._experts.look()

    def begin(self) -> None:
        """Start a new version, with no tensors staged."""
        super().begin()
        self._loaded.clear()

    def wake_weights(self) -> None:
        """Wait for the engine's last step, and look again where experts are: no step runs from here on, held or not."""
        super().wake_weights()
        if self._experts is not None:
            self._experts.hold.discard()
            self._experts.look()

    def finish(self, version: Version) -> None:
        """On rank 0, let every worker load its staged tensors. An error of any worker fails the commit through rank 0."""
        if self._direct is not None and self.received_direct:
            self._direct.process()
            self._loaded = {False}
        else:
            self.check_complete()
            if self._controls is not None:
                self._controls.install(COMMIT_SECONDS)
        self._version = version

    def flush(self) -> bool:
        """On rank 0, drop cached keys and values. Returns whether that succeeded."""
        return self._controls is None or self._controls.flush(COMMIT_SECONDS)

    def resume(self) -> None:
        """On rank 0, set the label and resume the engine.

        Raises:
            LoadError: This worker did not load the committed weights.
        """
        if len(self._loaded) < 1 + self.has_draft:
            raise LoadError("this vLLM worker did not load the committed weights")
        if self._experts is not None:
            self._experts.hold.end()
        if self._controls is not None:
            self._controls.label(str(self._version), COMMIT_SECONDS)
            self._controls.resume(COMMIT_SECONDS)

    # On the worker's thread.

    def loaded(self, *, draft: bool = False) -> None:
        """Report that the worker has loaded the staged tensors into its model, or into its ``draft`` model."""
        self._loaded.add(draft)
