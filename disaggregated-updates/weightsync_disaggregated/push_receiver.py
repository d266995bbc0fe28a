"""A vLLM worker's side of an external update (``weightsync push --engine vllm``): process group, staging, and digests.

Requests arrive over vLLM's weight-transfer routes. ``init_info`` is a body of ``init_weights_update_group``, whose ``tensors``
may list the names, dtypes and shapes of all tensors to be sent. ``update_info`` is one of

* a bucket, as a body of ``update_weights_from_distributed``, which is broadcast concurrently and staged;
* ``{"digests": {name: digest}}`` of all tensors sent, which are compared, and loaded if the digests are equal;
* ``{"abandon": true}``, which discards all staged tensors, so that the session can be finished without a label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import torch

from weightsync.config import update_networks
from weightsync.engine.adapter import EngineAdapter
from weightsync.errors import ConfigurationError, LoadError, MembershipError
from weightsync.protocol.messages import Pause
from weightsync.protocol.update_messages import Digested, Verify
from weightsync_disaggregated import checks
from weightsync_disaggregated.rank import DisaggregatedRank
from weightsync_disaggregated.requests import Digest, InitGroupRequest, Name, Tensors, UpdateRequest

_BUCKET_SECONDS = 300.0
_JOIN_SECONDS = 60.0
_MAX_BUCKET = 16 << 30

T = TypeVar("T")


class _Join(InitGroupRequest, frozen=True, kw_only=True):
    tensors: Tensors | None = None


class _Digests(msgspec.Struct, forbid_unknown_fields=True):
    digests: dict[Name, Digest]


class PushedUpdates:
    """Executes the requests described above for the worker of global ``rank``, on the calling thread."""

    def __init__(self, adapter: EngineAdapter, rank: int, device: torch.device) -> None:
        self._rank = DisaggregatedRank(adapter, rank=rank, device=device)
        self._update = 0  # number of the update; requests of earlier updates are rejected
        self.begun = False
        """Whether an update has begun and has neither ended nor failed."""
        self._loaded = False

    def join(self, init_info: Mapping[str, Any]) -> None:
        """Join the process group.

        Raises:
            ConfigurationError: The request is invalid, or its address is not allowed.
            ManifestMismatch: The announced tensors are not those of the model.
            MembershipError: The group exists already.
        """
        request, networks = _converted(init_info, _Join), update_networks()
        checks.check_networks(networks)
        checks.check_address(request.master_address, networks)
        if request.tensors is not None:  # compare before the engine is paused
            checks.check_tensors(request.tensors, self._rank.manifest, partial=False)
        checks.check_group(request, self._rank.rank + 1, (), self._rank.backends)
        try:
            self._rank.answer(request.message(), request.timeout or _JOIN_SECONDS)
        except MembershipError as error:
            raise MembershipError(f"{error}: if its creator is gone, use another name") from None

    def begin(self) -> None:
        """Begin an update with no tensors received. The sender must have paused the engine."""
        self.begun, self._loaded = True, False
        self._update += 1
        self._rank.answer(Pause("abort"), _BUCKET_SECONDS, self._update)

    def update(self, update_info: Mapping[str, Any], load: Callable[[], None]) -> None:
        """Execute one request.

        Args:
            update_info: The request.
            load: Called to load all staged tensors, after their digests were compared.

        Raises:
            ConfigurationError: The request is invalid.
            VerificationError: Digests differ. Nothing is loaded.
            WeightSyncError: The transfer or ``load`` raised it.
        """
        if "digests" in update_info:
            self._compare(_converted(update_info, _Digests).digests)
            load()
            self._loaded = True
            return
        request = _converted(update_info, UpdateRequest)
        tensors = checks.check_bucket(request, self._rank.manifest, _MAX_BUCKET, "elements")
        self._rank.answer(request.message(tensors), request.timeout or _BUCKET_SECONDS, self._update)

    def finish(self) -> None:
        """End the update, after which vLLM sets the label.

        Raises:
            LoadError: No weights were loaded.
        """
        if not self._loaded:
            raise LoadError("nothing was loaded: send the digests of all tensors before finishing the update")
        self.give_up()

    def give_up(self) -> None:
        """Abandon this update."""
        self.begun = self._loaded = False

    def close(self) -> None:
        """Leave the process group."""
        self._rank.close()

    def _compare(self, digests: Mapping[str, str]) -> None:
        digested = cast(Digested, self._rank.answer(Verify(), _BUCKET_SECONDS, self._update))
        checks.check_digests(self._rank.manifest, np.frombuffer(digested.digests, "<u8"), self._rank.known, None, digests)


def _converted(body: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(dict(body), kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"invalid request to the weightsync backend of vLLM: {error}") from None
