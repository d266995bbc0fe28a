"""Names of adapters: what was published under each, which versions are retired, and the numbers of names that are not used now."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from weightsync.coordinator.publications import Publications
from weightsync.errors import ConfigurationError
from weightsync.model import FIRST_EPOCH
from weightsync.model.lora import AdapterSpec

MOST_NAMES = 1 << 16
"""Names that may be published, and as many retired ones whose last numbers are known."""
MOST_NAMES_OF_A_TENANT = 1 << 10
"""The same for one token that is limited to adapters: a tenant cannot use up the room of the others."""


@dataclass(eq=False)
class AdapterName:
    """What is known of an adapter's name."""

    limits: str | None
    """Those of the token under which it was published first; ``None`` if an engine brought it."""
    publications: Publications = field(default_factory=Publications)
    source: str = ""
    """Whose regions hold the newest version, while they do."""
    spec: AdapterSpec | None = None
    """Of that version."""
    retired: int = -1
    """Versions up to this one are not served any more, except where a replica has less than ``keep`` newer ones."""
    keep: int = 0
    delivering: int = 0
    """Rounds that bring the newest version to late replicas."""

    def surplus(self, held: Collection[int]) -> list[int]:
        """Those of the versions that a replica has which are retired there."""
        kept = sorted(held)[-self.keep :] if self.keep else ()
        return [number for number in held if number <= self.retired and number not in kept]

    def retire(self, numbers: Collection[int], keep: int) -> bool:
        """Retire all of these versions but the newest ``keep``. Returns whether there were more."""
        retired = sorted(numbers)[: max(len(numbers) - keep, 0)]
        if retired:
            self.retired, self.keep = max(self.retired, *retired), keep
            self.publications.use(FIRST_EPOCH, self.retired)
            if self.source and self.spec is not None and self.publications.own[1] <= self.retired:
                self.overwritten()  # what its source still holds is not delivered any more
        return bool(retired)

    def overwritten(self) -> None:
        """The newest version cannot be read from its source any more, or must not."""
        self.publications.clear()
        self.source, self.spec = "", None

    @property
    def over(self) -> bool:
        """Whether nothing runs under the name, and all that was ever published here is retired: its last number says it all."""
        return not (self.delivering or self.source or self.publications.reserved) and self.publications.own[1] <= self.retired


class AdapterNames(dict[str, AdapterName]):
    """Names of which a version is served, or may be."""

    def __init__(self) -> None:
        super().__init__()
        self._of = Counter[str | None]()
        self._last: defaultdict[str | None, dict[str, int]] = defaultdict(dict)
        """Last numbers of the others, by limits and by name, the oldest first."""

    def add(self, name: str, limits: str | None) -> AdapterName:
        """Return the record of a name that is published from now on, or that an engine brings.

        Raises:
            ConfigurationError: Too many names are published.
        """
        if name not in self:
            published = sum(self._of.values()) - self._of[None]
            if limits is not None and published >= MOST_NAMES:
                raise ConfigurationError(f"this run knows {published:,} names of adapters already, so {name} cannot be added")
            if limits and self._of[limits] >= MOST_NAMES_OF_A_TENANT:
                raise ConfigurationError(
                    f"{self._of[limits]:,} names of adapters were published with this token, so {name} cannot be added: "
                    "Adapters.retire(name, keep=0) those that are not needed any more"
                )
            record = self[name] = AdapterName(limits)
            self._of[limits] += 1
            record.retired = max((numbers.pop(name, -1) for numbers in self._last.values()), default=-1)
            record.publications.use(FIRST_EPOCH, record.retired)
        return self[name]

    def was_retired(self, name: str) -> bool:
        """Whether all versions of a name were retired, and it is not published now."""
        return any(name in numbers for numbers in self._last.values())

    def forget(self, name: str) -> None:
        """Keep only the last number of a name."""
        record = self.pop(name)
        self._of[record.limits] -= 1
        numbers = self._last[record.limits]
        if record.retired >= 0:
            numbers[name] = record.retired
        if len(numbers) > (MOST_NAMES_OF_A_TENANT if record.limits else MOST_NAMES):
            del numbers[next(iter(numbers))]
