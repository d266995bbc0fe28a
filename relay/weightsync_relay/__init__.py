"""A relay: it follows a store of versions and publishes them to engines far from the trainer. ``weightsync relay`` runs one.

::

    with Relay(ObjectStore("s3://bucket/versions"), "my-run", public_key, "http://127.0.0.1:7400") as relay:
        relay.follow()

See ``docs/guides/store.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.first_use import on_first_use

if TYPE_CHECKING:
    from weightsync_relay.relay import Relay

__all__ = ["Relay"]


if not TYPE_CHECKING:  # the command's help needs no tensor library
    __getattr__ = on_first_use(__name__, {"Relay": "relay"})
