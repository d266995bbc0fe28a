"""Staleness bound: the number of rollouts that may start. Pure arithmetic.

The trainer consumes ``batch`` samples for each version. At version v, counted from the controller's start, it has consumed v
batches. So it consumes the n-th accepted sample at version ``n // batch``. At most ``(eta + v + 1) * batch`` samples may be
accepted or running. This bounds the age of a sample's first token to ``eta`` versions, if samples are consumed in the order in
which they started. A slow sample that others overtake is consumed later. ``RolloutSettings.max_age`` bounds the age of such
samples.
"""

from __future__ import annotations

from weightsync.errors import ConfigurationError, VersionError


def capacity(*, max_concurrent: int, eta: int, version: int, batch: int, accepted: int, running: int) -> int:
    """Return the number of rollouts that may start now. It is negative if more are running than a lowered bound allows.

    ``min(max_concurrent - running, (eta + version + 1) * batch - (accepted + running))``. ``version`` and ``accepted`` count from
    the same start.
    """
    return min(max_concurrent - running, (eta + version + 1) * batch - (accepted + running))


class Admission:
    """Counts running and accepted rollouts, and computes how many may start. Never waits. Not thread-safe.

    Args:
        batch: Rollouts in a batch.
        eta: Staleness bound in versions.
        max_concurrent: Most rollouts that run at the same time.

    Raises:
        ConfigurationError: The settings admit no rollout.
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
        """The trainer's version; ``None`` until it is known. Until then no rollout is admitted."""
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
        """Count versions from ``version`` on, because a resumed run may start at any number. Only the first call has an effect."""
        self._first = version if self._first is None else self._first

    def publish(self, version: int) -> None:
        """Set the trainer's version. Counting starts at the first version, unless :meth:`begin` was called.

        Raises:
            VersionError: ``version`` is lower than the current one.
        """
        if self._version is not None and version < self._version:
            raise VersionError(f"the trainer's version decreased from {self._version} to {version}: start a new rollout controller")
        self.begin(version)
        self._version = version

    def restart(self) -> None:
        """Start counting again at the next version, after a new epoch began. All accepted samples are dropped."""
        self._first = self._version = None
        self.accepted = 0

    def start(self) -> None:
        """Count a rollout that starts.

        Raises:
            VersionError: The bound allows no rollout.
        """
        if self.capacity <= 0:
            raise VersionError(
                f"no rollout may start: {self.running} are running and {self.accepted} are accepted at version {self._version}"
            )
        self.running += 1

    def end(self, accepted: bool) -> None:
        """Count a rollout that ended, with or without a sample for the trainer."""
        self.running -= 1
        self.accepted += accepted

    def drop(self, samples: int) -> None:
        """Remove ``samples`` accepted samples that were dropped as too old. Others may replace them."""
        self.accepted -= samples
