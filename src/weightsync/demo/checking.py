"""Whether every recorded token is what its version's checkpoint says: regenerate, compare, count."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weightsync.demo.generation import greedy
from weightsync.demo.models import build_model
from weightsync.demo.oracle import Oracle
from weightsync.demo.records import Response
from weightsync.demo.settings import Settings
from weightsync.errors import Aborted

__all__ = ["Checker", "Findings", "Segment", "Verdict", "checker_for"]


@dataclass(frozen=True)
class Segment:
    """Tokens made in one run: after ``prefix``, under ``version``."""

    version: int
    prefix: tuple[int, ...]
    tokens: tuple[int, ...]


class Verdict(enum.Enum):
    """What became of one response; exactly one of these holds.

    * ``SOUND``: every segment is, token by token, what the checkpoint of the version on its label generates.
    * ``MISLABELLED``: some segment is not, but every such segment is what one other published version generates for the same
      prefix. Whole weights, wrong name.
    * ``TORN``: anything else. Some segment is what no published version generates (weights of several versions mixed, weights
      damaged, weights never published), or the record itself is broken: the label changes inside a run, or the counts of
      tokens and labels differ.
    """

    SOUND = "sound"
    MISLABELLED = "mislabelled"
    TORN = "torn"


@dataclass
class Findings:
    """Counts over all responses, and the responses that are not sound."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    wrong: list[tuple[Response, Verdict]] = field(default_factory=list)
    probes: dict[tuple[int, str], bool] = field(default_factory=dict)
    """By version and replica: whether all probe answers were made by that version alone, and equal its checkpoint's."""

    @property
    def checked(self) -> int:
        """Responses with at least one token."""
        return sum(self.counts.values())

    @property
    def torn(self) -> int:
        """Responses that no published version explains."""
        return self.counts[Verdict.TORN]

    @property
    def mislabelled(self) -> int:
        """Responses that another version than the labelled one explains."""
        return self.counts[Verdict.MISLABELLED]


def _segments(response: Response) -> list[Segment] | None:
    """The runs of a response; ``None`` if the record is broken."""
    count = len(response.tokens)
    bounds = [*response.prefills, count]
    ascending = all(a < b for a, b in itertools.pairwise(bounds))
    if len(response.token_versions) != count or bounds[0] != 0 or not ascending:
        return None
    found = []
    for start, stop in itertools.pairwise(bounds):
        labels = set(response.token_versions[start:stop])
        if len(labels) != 1:
            return None
        found.append(Segment(labels.pop(), response.prompt + response.tokens[:start], response.tokens[start:stop]))
    return found


class Checker:
    """Regenerates with the checkpoints of an :class:`~weightsync.demo.oracle.Oracle`, each continuation once.

    Greedy generation only ever adds to what it has, so one run of the longest length answers all shorter ones with the same
    prefix. ``stopped`` is asked before each run; if it says yes, :class:`~weightsync.errors.Aborted` is raised.
    """

    def __init__(self, oracle: Oracle, stopped: Callable[[], bool] = lambda: False) -> None:
        self._oracle = oracle
        self._published = oracle.versions()
        self._stopped = stopped
        self._end = None if not self._published else oracle.model(self._published[0]).generation_config.eos_token_id
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self._longest: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def expected(self, version: int, prefix: Sequence[int], count: int) -> tuple[int, ...]:
        """What the checkpoint of ``version`` makes of ``prefix``: at most ``count`` tokens."""
        key = (version, tuple(prefix))
        known = self._known.get(key, ())
        if len(known) < count and not (known and known[-1] == self._end):
            if self._stopped():
                raise Aborted("checking was stopped")
            known = tuple(greedy(self._oracle.model(version), key[1], max(count, self._longest[key])))
            self._known[key] = known
        return known[:count]

    def _made_by(self, version: int, segment: Segment) -> bool:
        return version in self._published and self.expected(version, segment.prefix, len(segment.tokens)) == segment.tokens

    def verdict(self, response: Response) -> Verdict:
        """See :class:`Verdict`."""
        segments = _segments(response)
        if segments is None:
            return Verdict.TORN
        verdict = Verdict.SOUND
        for segment in segments:
            if self._made_by(segment.version, segment):
                continue
            if not any(self._made_by(other, segment) for other in self._published if other != segment.version):
                return Verdict.TORN
            verdict = Verdict.MISLABELLED
        return verdict

    def check(self, responses: Iterable[Response]) -> Findings:
        """All of them. A response without tokens says nothing and is not counted."""
        told = [response for response in responses if response.tokens]
        for response in told:
            for segment in _segments(response) or ():
                key = (segment.version, segment.prefix)
                self._longest[key] = max(self._longest[key], len(segment.tokens))
        findings = Findings()
        for response in told:
            verdict = self.verdict(response)
            findings.counts[verdict] += 1
            if verdict is not Verdict.SOUND:
                findings.wrong.append((response, verdict))
            if response.probe_of is not None:
                key_of_probe = (response.probe_of, response.replica)
                good = verdict is Verdict.SOUND and set(response.token_versions) == {response.probe_of}
                findings.probes[key_of_probe] = findings.probes.get(key_of_probe, True) and good
        return findings


def checker_for(settings: Settings, directory: Path, stopped: Callable[[], bool]) -> Checker:
    """A checker against the checkpoints in ``directory``, computing as the replicas do: one thread, the same model class.

    vLLM sums in another order than Transformers. It serves the checkpoint in float32, where that hardly ever changes which token
    is the likeliest; so this computes in float32 too.
    """
    torch.set_num_threads(1)
    blank = build_model(settings.model, tied=settings.tied, seed=settings.seed)
    if settings.engine == "vllm":
        torch.nn.Module.to(blank, dtype=torch.float32)  # in place
    return Checker(Oracle(directory, blank), stopped)
