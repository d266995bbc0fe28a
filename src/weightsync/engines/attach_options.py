"""What the workers of an engine take to join a coordinator as ranks of one replica, and the joining itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from weightsync.config import token_for_request, variable
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.errors import ConfigurationError
from weightsync.protocol.messages import Delivery


@dataclass(kw_only=True)
class AttachOptions:
    """Options of a worker, from the caller of ``attach``, from a request, or from the worker's environment."""

    replica: str | None = None
    """Name of the replica; by default ``WEIGHTSYNC_REPLICA``."""
    coordinator: str | None = None
    """URL of the coordinator; by default ``WEIGHTSYNC_COORDINATOR``."""
    token: str | None = None
    """Token of the coordinator. Prefer the worker's environment, which must then name the same coordinator."""
    run: str = ""
    bucket_bytes: int | None = None
    """Size of a staging bucket; by default chosen from free memory, see :class:`weightsync.Engine`."""
    transports: list[str] | None = None
    delivery: Delivery | None = None
    """Defaults to ``WEIGHTSYNC_DELIVERY``, and that to ``auto``: direct if the model can be written so, otherwise streamed."""

    def chosen_delivery(self) -> Delivery:
        """Return :attr:`delivery`, or the environment's.

        Raises:
            ConfigurationError: It is not one of the deliveries.
        """
        delivery = self.delivery or variable("WEIGHTSYNC_DELIVERY") or "auto"
        if delivery not in get_args(Delivery):
            source = "delivery" if self.delivery else "WEIGHTSYNC_DELIVERY"
            raise ConfigurationError(f"{source} is {delivery!r}; choose from {', '.join(get_args(Delivery))}")
        return delivery  # type: ignore[return-value]  # checked

    def join(self, adapter: EngineAdapter, rank: int, world_size: int, delivery: Delivery) -> Engine:
        """Join as ``rank`` of the replica. Raises what :class:`weightsync.Engine` and :func:`token_for_request` raise."""
        token = token_for_request(self.coordinator, self.token)
        return Engine(
            adapter, self.replica or None, self.coordinator, token=token, rank=rank, world_size=world_size, run=self.run,
            delivery=delivery, bucket_bytes=self.bucket_bytes, transports=self.transports,
        )  # fmt: skip
