"""A vLLM worker's part in an update from outside (``weightsync push --engine vllm``): a process group, staging, and digests.

It comes over vLLM's own weight-transfer routes. ``init_info`` is a body of ``init_weights_update_group``, in which
``tensors`` may have the names, dtypes and shapes of everything that will be sent; ``update_info`` is one of

* a bucket, a body of ``update_weights_from_distributed``: broadcast meanwhile, and staged;
* ``{"digests": {name: digest}}`` of everything that was sent: compared, and loaded if it is right;
* ``{"abandon": true}``: what came is forgotten, and the session can be finished without a label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from weightsync.config import update_networks
from weightsync.engines.vllm.adapter import VllmWorkerAdapter
from weightsync.errors import ConfigurationError, LoadError, MembershipError
from weightsync.external.checks import (
    check_address,
    check_bucket,
    check_digests,
    check_group,
    check_networks,
    check_tensors,
)
from weightsync.external.orders import Describe, Described, Digested, JoinGroup, PauseRank, Receive, Verify
from weightsync.external.rank import DisaggregatedRank
from weightsync.external.requests import Digest, InitGroupRequest, Name, Tensors, UpdateRequest

__all__ = ["PushedUpdates", "is_group"]

_PATIENCE = 300.0  # seconds for a bucket
_JOINING = 60.0
_MAX_BUCKET = 16 << 30

T = TypeVar("T")


class _Join(InitGroupRequest, frozen=True, kw_only=True):
    tensors: Tensors | None = None


class _Digests(msgspec.Struct, forbid_unknown_fields=True):
    digests: dict[Name, Digest]


def is_group(init_info: Mapping[str, Any]) -> bool:
    """Whether this asks for a group, rather than for a rank of a replica."""
    return "master_address" in init_info


class PushedUpdates:
    """Obeys bodies as described above on behalf of one worker, ``rank`` of all, in the thread that calls."""

    def __init__(self, adapter: VllmWorkerAdapter, rank: int, device: torch.device) -> None:
        self._rank = DisaggregatedRank(adapter, rank=rank, device=device)
        self._received: set[int] = set()  # in the manifest
        self._update = 0  # its number: a rank takes nothing of an earlier one
        self.begun = False
        """Whether an update has begun, and neither ended nor failed."""
        self._loaded = False

    def join(self, init_info: Mapping[str, Any]) -> None:
        """Join the group.

        Raises :class:`~weightsync.errors.ConfigurationError`, :class:`~weightsync.errors.ManifestMismatch` for tensors that do not
        fit, and what joining raises.
        """
        request, networks = _converted(init_info, _Join), update_networks()
        check_networks(networks)
        check_address(request.master_address, networks)
        if request.tensors is not None:  # before the engine is paused
            check_tensors(request.tensors, self._rank.manifest, partial=False)
        known = self._rank.obey(Describe())
        check_group(request, self._rank.rank + 1, (), known.backends if isinstance(known, Described) else ())
        timeout = request.timeout or _JOINING
        place = (request.master_address, request.master_port)
        try:
            self._rank.obey(
                JoinGroup(request.group_name, request.backend, *place, request.rank_offset, request.world_size, timeout)
            )
        except MembershipError as error:
            raise MembershipError(f"{error}: if whoever made it is gone, use another name") from None

    def begin(self) -> None:
        """A session: nothing has come yet. Pausing the engine was for whoever pushes to see to."""
        self.begun, self._loaded = True, False
        self._received.clear()
        self._update += 1
        self._rank.obey(PauseRank("abort", _PATIENCE, self._update))

    def update(self, update_info: Mapping[str, Any], load: Callable[[], None]) -> None:
        """Obey one body; ``load`` is called to load everything that is staged. Raises what went wrong; nothing is loaded then."""
        if "digests" in update_info:
            self._compare(_converted(update_info, _Digests).digests)
            load()
            self._loaded = True
            return
        request = _converted(update_info, UpdateRequest)
        tensors = check_bucket(request, self._rank.manifest, _MAX_BUCKET, "elements")
        flattened = request.load_format == "flattened_bucket"
        self._rank.obey(Receive(request.group_name, tensors, flattened, request.timeout or _PATIENCE, self._update))
        self._received.update(tensor.index for tensor in tensors)

    def finish(self) -> None:
        """The session ends and vLLM takes the label. Raises :class:`~weightsync.errors.LoadError` if nothing was loaded."""
        if not self._loaded:
            raise LoadError("nothing was loaded: send digests of everything that was sent before the update is finished")
        self.give_up()

    def give_up(self) -> None:
        """Nothing more comes of this update."""
        self.begun = self._loaded = False

    def close(self) -> None:
        """Leave the group."""
        self._rank.close()

    def _compare(self, digests: Mapping[str, str]) -> None:
        digested = self._rank.obey(Verify(self._update))
        held = np.frombuffer(digested.digests, "<u8") if isinstance(digested, Digested) else np.empty(0, np.uint64)
        known = np.zeros(len(self._rank.manifest), np.bool_)
        known[list(self._received)] = True
        check_digests(self._rank.manifest, held, known, None, digests)


def _converted(body: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(dict(body), kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"not a body that this vLLM's backend knows: {error}") from None
