"""An engine of one's own: samples from a plain module, and says of each token how likely it was and which version made it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from examples.demo.gate import Gate
from weightsync.deadline import Deadline
from weightsync.model import PauseMode, Version
from weightsync_rollouts.samples import FinishReason

__all__ = ["Answer", "Sampler"]


@dataclass
class Answer:
    """All lists have one entry a token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"


class Sampler:
    """One model behind the demo's gate, which holds each run to one version. :meth:`complete` may be called by several threads."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        model.train(False)
        self.gate = Gate()
        self._turn = threading.Lock()
        self._random = torch.Generator().manual_seed(seed)

    def complete(self, prompt: Sequence[int], budget: int, temperature: float, stop: Sequence[int], deadline: Deadline) -> Answer:
        """At most ``budget`` tokens. A pause cuts the answer off (``abort``) or lets it go on with the new weights (``keep``).

        Raises what :meth:`~examples.demo.gate.Gate.entered` raises.
        """
        answer = Answer()
        while True:
            with self.gate.entered(deadline) as version, self._turn:
                while len(answer.tokens) < budget and not self.gate.stopping:
                    self._one_more(prompt, answer, temperature)
                    answer.versions.append(version.number)
                    if answer.tokens[-1] in stop:
                        answer.finish_reason = "stop"
                        return answer
                if len(answer.tokens) >= budget:
                    return answer
                if self.gate.mode == "abort":
                    answer.finish_reason = "abort"
                    return answer

    def _one_more(self, prompt: Sequence[int], answer: Answer, temperature: float) -> None:
        """Sequences are short: reading one anew for each token costs less than a cache, and needs none dropped in a round."""
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([[*prompt, *answer.tokens]]), use_cache=False).logits[0, -1].float()
            # The reported probability is the model's own, at temperature 1, as vLLM reports it by default.
            known = torch.log_softmax(logits, -1)
            scaled = torch.softmax(logits / temperature, -1) if temperature > 0 else (logits == logits.max()).float()
            token = int(torch.multinomial(scaled, 1, generator=self._random))
        answer.tokens.append(token)
        answer.logprobs.append(float(known[token]))

    # What the adapter asks of a server (examples.demo.completions_adapter.Served).

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """See :meth:`~examples.demo.gate.Gate.pause`."""
        self.gate.pause(mode, timeout)

    def label(self, version: Version) -> None:
        """See :meth:`~examples.demo.gate.Gate.label`."""
        self.gate.label(version)

    def flush(self) -> bool:
        """Nothing is cached."""
        return self.gate.idle

    def resume(self) -> None:
        """See :meth:`~examples.demo.gate.Gate.resume`."""
        self.gate.resume()
