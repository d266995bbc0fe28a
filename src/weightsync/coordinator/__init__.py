"""The protocol: who is here, what a round does, what is done when something fails. No tensor, no network.

:class:`Coordinator` is the way in; :func:`~weightsync.coordinator.round.run_round` is the protocol itself.
"""

from weightsync.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
