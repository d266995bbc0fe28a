"""Coordination protocol: membership, rounds, and recovery from failures. Uses no tensor and no network.

:class:`Coordinator` is the entry point. :func:`~weightsync.coordinator.round.run_round` is the protocol of one round.
"""

from weightsync.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
