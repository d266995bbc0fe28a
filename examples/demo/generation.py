"""The demo's rollout engine: greedy generation by Transformers behind a gate that a round can close."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from examples.demo.gate import Gate
from weightsync.deadline import Deadline
from weightsync.engines.module_loras import ModuleLoras
from weightsync.errors import Aborted, DeadlineExceeded, VersionError
from weightsync.model import PauseMode, Version
from weightsync.model.lora import LoraSlots, adapter_label

__all__ = ["Completion", "FinishReason", "Generator", "greedy"]

FinishReason = Literal["stop", "length", "abort"]


class _WhenStopping(StoppingCriteria):  # type: ignore[misc]
    """Ends a run at the token after the gate began to close."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    # Transformers copies the list of criteria for every call; the gate itself must not be copied.
    def __deepcopy__(self, memo: dict[int, Any]) -> _WhenStopping:
        return self

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._gate.stopping, dtype=torch.bool)


def greedy(model: PreTrainedModel, prefix: Sequence[int], budget: int, gate: Gate | None = None) -> list[int]:
    """At most ``budget`` tokens after ``prefix``, the likeliest each, until the end token or the gate's wish.

    Batches of one and one call shape everywhere: serving and checking do the same arithmetic in the same order, so their tokens
    are comparable one by one.
    """
    ids = torch.tensor([list(prefix)], dtype=torch.long)
    stop = StoppingCriteriaList([] if gate is None else [_WhenStopping(gate)])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=budget, do_sample=False, num_beams=1, stopping_criteria=stop
        )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


@dataclass
class Completion:
    """The tokens of one answer, and under which version (its number and its epoch) each was made."""

    tokens: list[int] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    token_epochs: list[int] = field(default_factory=list)
    prefills: list[int] = field(default_factory=list)
    """Positions in ``tokens`` at which the prompt and all earlier tokens were read anew: the first, and each after a pause."""
    finish_reason: FinishReason = "length"
    adapter: str = ""
    """Name and number of the adapter that all of its tokens were made with; empty for the base weights alone."""


class Generator:
    """One model and its gate. :meth:`complete` may run in several threads; a round closes the gate around them.

    With ``slots`` it holds that many versions of LoRA adapters, and makes one answer at a time.
    """

    def __init__(self, model: PreTrainedModel, slots: LoraSlots | None = None) -> None:
        self.model = model
        model.train(False)
        self.gate = Gate()
        self.loras = None if slots is None else ModuleLoras(model, slots)
        self._alone = threading.Lock()
        self._end = model.generation_config.eos_token_id

    def complete(self, prompt: Sequence[int], budget: int, deadline: Deadline, adapter: str = "") -> Completion:
        """Answer ``prompt`` with at most ``budget`` tokens, with ``adapter`` (a name: its newest version; or a label) if given.

        A pause met on the way is survived (mode ``keep``) or ends the answer with what it has (``abort``); a pause that
        outlasts the deadline does the latter too. The adapter's version stays the same for the whole answer.

        Raises what :meth:`~examples.demo.gate.Gate.entered` raises while there is no token yet, and
        :class:`~weightsync.errors.VersionError` if the adapter is not served here.
        """
        with self._adapted(adapter, deadline) as label:
            answer = self._complete(prompt, budget, deadline)
            answer.adapter = label
            return answer

    @contextmanager
    def _adapted(self, adapter: str, deadline: Deadline) -> Iterator[str]:
        """Compute with the adapter in the block, alone with the model: which adapter its hooks add is one for all threads."""
        if self.loras is None:
            if adapter:
                raise VersionError(f"this replica serves no adapters, so not {adapter}")
            yield ""
            return
        if not self._alone.acquire(timeout=deadline.remaining("another answer")):
            raise DeadlineExceeded(f"other answers took more than {deadline.seconds:g} s")
        try:
            with self.loras.using(adapter) if adapter else nullcontext() as version:
                yield "" if version is None else adapter_label(version.run, version.number)
        finally:
            self._alone.release()

    def _complete(self, prompt: Sequence[int], budget: int, deadline: Deadline) -> Completion:
        answer = Completion()
        while True:
            try:
                with self.gate.entered(deadline) as version:
                    fresh = greedy(self.model, [*prompt, *answer.tokens], budget - len(answer.tokens), self.gate)
                    mode = self.gate.mode
            except (DeadlineExceeded, Aborted):
                if not answer.tokens:
                    raise
                answer.finish_reason = "abort"
                return answer
            answer.prefills.append(len(answer.tokens))
            answer.tokens += fresh
            answer.token_versions += [version.number] * len(fresh)
            answer.token_epochs += [version.epoch] * len(fresh)
            if fresh[-1] == self._end:
                answer.finish_reason = "stop"
            elif len(answer.tokens) >= budget:
                answer.finish_reason = "length"
            elif mode == "abort":
                answer.finish_reason = "abort"
            else:
                continue
            return answer

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """See :meth:`~examples.demo.gate.Gate.pause`."""
        self.gate.pause(mode, timeout)

    def label(self, version: Version) -> None:
        """See :meth:`~examples.demo.gate.Gate.label`."""
        self.gate.label(version)

    def flush(self) -> bool:
        """Whether no key or value of old weights is left: each run owns its cache, so none is when nobody runs."""
        return self.gate.idle

    def resume(self) -> None:
        """See :meth:`~examples.demo.gate.Gate.resume`."""
        self.gate.resume()
