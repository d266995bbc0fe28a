"""The protocol: who is here, what a round does, what is done when something fails. No tensor, no network.

:class:`Coordinator` is the way in; :func:`~weightsync.control.round.run_round` is the protocol itself.
"""

from weightsync.control.coordinator import Coordinator
from weightsync.control.settings import Settings

__all__ = ["Coordinator", "Settings"]
