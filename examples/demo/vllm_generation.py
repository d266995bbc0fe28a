"""vLLM behind the demo's completion server: its own version spans say which weights made each token."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

from examples.demo.gate import Gate
from examples.demo.generation import Completion, FinishReason
from examples.demo.records import Order
from weightsync.deadline import Deadline
from weightsync.engines.staged_adapter import UNLABELLED
from weightsync.errors import Aborted, DeadlineExceeded, VersionError
from weightsync.model import FIRST_EPOCH, Version, parse_label

__all__ = ["VllmGenerator"]

_NOBODY = (FIRST_EPOCH, -1)
"""Stands for weights without a version: no checkpoint explains such a token, so the check would call it torn."""
_RUN_SECONDS = 5.0
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


def _order(label: str) -> Order:
    parsed = parse_label(label)
    return _NOBODY if parsed is None else parsed[1:]


class GeneratingEngine(Protocol):
    """The part of vLLM's ``AsyncLLM`` that answers requests."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:  # noqa: ANN401
        """Outputs as they come."""
        ...


class VllmGenerator:
    """Hands requests to an ``AsyncLLM`` on its own event loop; :meth:`complete` may run in several threads.

    The gate only shows what vLLM's label says and keeps requests from an engine that was never seeded. Pausing is vLLM's own.
    """

    def __init__(self, engine: GeneratingEngine, loop: asyncio.AbstractEventLoop, end: int) -> None:
        self._engine, self._loop, self._end = engine, loop, end
        self._numbers = itertools.count()
        self.gate = Gate()

    def labelled(self, label: str) -> None:
        """Take the new name of vLLM's weights."""
        self.gate.pause("keep", _RUN_SECONDS)
        if label != UNLABELLED:
            run, epoch, number = parse_label(label) or (None, *_NOBODY)
            self.gate.label(Version(run or "", number, "", "", epoch))
            self.gate.resume()

    def complete(self, prompt: Sequence[int], budget: int, deadline: Deadline, adapter: str = "") -> Completion:
        """Answer ``prompt`` with at most ``budget`` tokens; see :class:`~examples.demo.generation.Completion`.

        Raises what :meth:`~examples.demo.gate.Gate.entered` raises, :class:`~weightsync.errors.DeadlineExceeded`, and
        :class:`~weightsync.errors.VersionError` for any ``adapter``.
        """
        if adapter:
            raise VersionError(f"this replica serves no adapters, so not {adapter}")
        with self.gate.entered(deadline):
            pass  # it was seeded; a pause from here on is vLLM's to keep
        answer = asyncio.run_coroutine_threadsafe(self._generate(list(prompt), budget), self._loop)
        try:
            return answer.result(deadline.remaining("vLLM's answer"))
        except FutureTimeout:
            answer.cancel()
            raise DeadlineExceeded(f"vLLM did not answer within {deadline.seconds:g} s") from None

    async def _generate(self, prompt: list[int], budget: int) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wish = SamplingParams(
            temperature=0, max_tokens=budget, stop_token_ids=[self._end], detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        asked = self._engine.generate({"prompt_token_ids": prompt}, wish, f"demo-{next(self._numbers)}")
        outputs = [output async for output in asked]
        if not outputs:
            raise Aborted("vLLM ended the request without an answer")
        made = outputs[-1].outputs[0]
        answer = Completion(tokens=list(made.token_ids), finish_reason=_REASONS.get(made.finish_reason, "abort"))
        for span in made.weight_versions or ():
            answer.prefills.append(span.start)
            epoch, number = _order(span.version)
            answer.token_versions += [number] * (span.end - span.start)
            answer.token_epochs += [epoch] * (span.end - span.start)
        return answer
