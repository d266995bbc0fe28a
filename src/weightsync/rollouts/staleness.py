"""How many rollouts may start: the staleness bound, as arithmetic without any dependency.

A batch of ``batch`` samples is consumed to make one version. When the trainer is at version v it has consumed v batches (counted
from where the controller began), so a sample that is the n-th to be accepted is consumed at version ``n // batch``. Letting at most
``(eta + v + 1) * batch`` samples be accepted or under way bounds how much older than the trainer a sample's first token can be:
at most ``eta`` versions, for samples that are consumed in the order in which they began. One that takes long and is overtaken by
others is consumed later than that; ``RolloutSettings.max_age`` bounds these.
"""

from __future__ import annotations

from weightsync.errors import ConfigurationError, VersionError

__all__ = ["Admission", "capacity"]


def capacity(*, max_concurrent: int, eta: int, version: int, batch: int, accepted: int, running: int) -> int:
    """Rollouts that may start now; negative where more are under way than a lowered bound allows.

    ``min(max_concurrent - running, (eta + version + 1) * batch - (accepted + running))``. ``version`` and ``accepted`` count from
    the same beginning.
    """
    return min(max_concurrent - running, (eta + version + 1) * batch - (accepted + running))


class Admission:
    """Counts what runs and what was accepted, and says what may start. Used by one thread; never waits.

    ``eta`` is the staleness bound in versions. Raises :class:`~weightsync.errors.ConfigurationError` for settings that admit
    nothing.
    """

    def __init__(self, batch: int, eta: int, max_concurrent: int) -> None:
        if batch < 1 or eta < 0 or max_concurrent < 1:
            raise ConfigurationError(
                f"rollouts need a batch of at least 1, a staleness bound of at least 0 and a concurrency of at least 1, not "
                f"{batch}, {eta}, {max_concurrent}"
            )
        self.batch, self.eta, self.max_concurrent = batch, eta, max_concurrent
        self.accepted = self.running = 0
        self._first: int | None = None
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The trainer's version; ``None`` until one is known, and then nothing is admitted."""
        return self._version

    @property
    def capacity(self) -> int:
        """See :func:`capacity`; zero while no version is known."""
        if self._first is None or self._version is None:
            return 0
        return capacity(
            max_concurrent=self.max_concurrent,
            eta=self.eta,
            version=self._version - self._first,
            batch=self.batch,
            accepted=self.accepted,
            running=self.running,
        )

    def begin(self, version: int) -> None:
        """Count from here, so that a run may be taken up at any number. Without effect where something was told before."""
        self._first = version if self._first is None else self._first

    def publish(self, version: int) -> None:
        """The trainer is at ``version``; where nothing was told before, counting begins here.

        Raises :class:`~weightsync.errors.VersionError` for one that goes backwards.
        """
        if self._version is not None and version < self._version:
            raise VersionError(f"the trainer went back from version {self._version} to {version}: start a new rollout controller")
        self.begin(version)
        self._version = version

    def restart(self) -> None:
        """Count anew from the next version that is told: a new epoch began, and nothing that was accepted is used any more."""
        self._first = self._version = None
        self.accepted = 0

    def start(self) -> None:
        """One rollout starts. Raises :class:`~weightsync.errors.VersionError` where the bound allows none."""
        if self.capacity <= 0:
            raise VersionError(f"no rollout may start: {self.running} run, {self.accepted} are accepted at version {self._version}")
        self.running += 1

    def end(self, accepted: bool) -> None:
        """One rollout ended, with or without a sample for the trainer."""
        self.running -= 1
        self.accepted += accepted

    def drop(self, samples: int) -> None:
        """So many accepted samples were thrown away as too old: others may take their place."""
        self.accepted -= samples
