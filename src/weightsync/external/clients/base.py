"""Updating a running engine from outside, over its own HTTP routes and a process group: one interface for all engines.

A client is one engine at one URL. What it says to the engine is built by pure functions, a file for each engine; this file sends
it: the request from a thread, the bytes through the group meanwhile, and no wait without a deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import accumulate
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import httpx
import msgspec
import torch

from weightsync.config import Secret
from weightsync.deadline import Deadline
from weightsync.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceeded,
    LoadError,
    PeerLost,
    ProtocolError,
    WeightSyncError,
    from_wire,
)
from weightsync.forks import Origin
from weightsync.model import Manifest, PauseMode, TensorSpec
from weightsync.protocol.messages import UNREADABLE
from weightsync.protocol.tokens import bearer
from weightsync.transports.broadcast.process_groups import Backend, ProcessGroup, StoreRendezvous, init_custom_process_group
from weightsync.transports.hostinfo import reachable_address

__all__ = ["Bucket", "GroupSpec", "HttpCall", "UpdateClient", "bucket_body", "group_body", "tensors_body"]

_CLEANUP_SECONDS = 10.0
_MAX_REPLY = 1 << 20

T = TypeVar("T")


class HttpCall(NamedTuple):
    """One HTTP request, as a value. ``json`` of ``None``: a request without a body."""

    method: str
    path: str
    json: dict[str, Any] | None = None


class GroupSpec(NamedTuple):
    """A process group that the engine shall join: the trainer is rank 0, the engine's ranks follow from ``rank_offset``."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    name: str
    backend: Backend


class Bucket(NamedTuple):
    """What one request speaks of. ``memory`` holds the tensors of ``specs`` one after the other, without padding (``uint8``)."""

    specs: Sequence[TensorSpec]
    memory: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """The bytes of each tensor: views of ``memory``."""
        sizes = [spec.nbytes for spec in self.specs]
        ends = list(accumulate(sizes))
        return [self.memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def group_body(request: GroupSpec) -> dict[str, Any]:
    """The body of LMDeploy's and SGLang's ``init_weights_update_group``."""
    return {
        "master_address": request.address,
        "master_port": request.port,
        "rank_offset": request.rank_offset,
        "world_size": request.world_size,
        "group_name": request.name,
        "backend": request.backend,
    }


def bucket_body(specs: Sequence[TensorSpec], group: str) -> dict[str, Any]:
    """What LMDeploy's and SGLang's ``update_weights_from_distributed`` have in common. A flattened bucket has one dtype.

    Only with one dtype do both engines mean the same bytes by a flattened bucket. Raises
    :class:`~weightsync.errors.ConfigurationError` for several.
    """
    dtypes = {spec.dtype for spec in specs}
    if len(dtypes) > 1:
        raise ConfigurationError(f"a flattened bucket holds one dtype, not {', '.join(sorted(dtypes))}")
    return tensors_body(specs) | {"group_name": group, "load_format": "flattened_bucket"}


def tensors_body(specs: Iterable[TensorSpec]) -> dict[str, Any]:
    """Names, dtypes and shapes, as all these routes have them."""
    specs = list(specs)
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


class UpdateClient(ABC):
    """One engine to be updated. Derive from it for a kind of engine; methods that it does not have raise ``ConfigurationError``.

    An update is ``check``, ``join``, ``pause``, ``begin``, ``update`` for every bucket (``last`` with the last), ``commit``,
    ``flush`` (true where the engine flushed already), ``resume``. After an error: ``abort``, and everything again; an engine that
    was not committed must not be resumed. Used by one thread. Raises :class:`~weightsync.errors.LoadError` for what the engine
    refused, :class:`~weightsync.errors.PeerLost` and :class:`~weightsync.errors.DeadlineExceeded`; errors of another weightsync are
    raised as what they are.
    """

    engine = "custom"
    verifies = False
    """Whether the engine compares digests before it serves."""

    def __init__(
        self,
        url: str,
        *,
        token: Secret | None = None,
        group: str = "weightsync",
        backend: Backend = "nccl",
        ranks: int = 1,
        address: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._origin = Origin()
        self.url, self.group_name, self.backend, self.ranks = url.rstrip("/"), group, backend, ranks
        self._address, self._device = address, device
        self._http = httpx.Client(
            base_url=self.url, headers=bearer(token), trust_env=False, follow_redirects=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # vLLM closes one after an error, which the next request would meet
        )  # fmt: skip
        if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
            raise ConfigurationError(f"{url!r} is not the URL of an engine; write it as http://host:port")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="weightsync-push")
        self._group: ProcessGroup | None = None
        self.label = ""

    # What an engine's own file says.

    @abstractmethod
    def _init(self, request: GroupSpec) -> HttpCall: ...

    @abstractmethod
    def _destroy(self) -> HttpCall | None: ...

    @abstractmethod
    def _bucket(self, specs: Sequence[TensorSpec], last: bool) -> HttpCall: ...

    @abstractmethod
    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Stop generating; what running requests come to is for ``mode`` to say, as far as the engine knows it."""

    @abstractmethod
    def resume(self, deadline: Deadline) -> None:
        """Generate again."""

    @abstractmethod
    def flush(self, deadline: Deadline) -> None:
        """Drop caches made with the old weights. Raises :class:`~weightsync.errors.LoadError` if the engine did not."""

    @abstractmethod
    def version(self, deadline: Deadline) -> str | None:
        """The label of the weights that the engine says it serves; ``None`` where it says nothing."""

    def begin(self, label: str | None, fingerprint: str | None, deadline: Deadline, whole: Deadline | None = None) -> None:
        """Start an update to ``label``.

        Args:
            label: The version's label, if it has one.
            fingerprint: That of the manifest of everything that will be sent, if it is known.
            deadline: Bounds this step.
            whole: Bounds the update, for an engine that ends it by itself; without it, ``deadline``.
        """
        self.label = label or ""

    @abstractmethod
    def commit(self, digests: Mapping[str, str], deadline: Deadline) -> str:
        """End an update of which everything was sent, and say in words what the engine made of it."""

    @abstractmethod
    def abort(self, deadline: Deadline) -> None:
        """Give an update up, as far as the engine has a way to."""

    @abstractmethod
    def check(self, manifest: Manifest, label: str | None, deadline: Deadline) -> None:
        """Before anything is paused: raise what the engine has against these tensors, as far as it has a way to tell."""

    # The same for all.

    def join(self, deadline: Deadline) -> None:
        """Make a group with the engine's ranks."""
        host, port = self._http.base_url.host, self._http.base_url.port or (443 if self._http.base_url.scheme == "https" else 80)
        address = self._address or reachable_address(host, port)
        world = self.ranks + 1
        rendezvous = StoreRendezvous(address, world, deadline)
        spec = GroupSpec(address, rendezvous.port, 1, world, self.group_name, self.backend)

        def here() -> ProcessGroup:
            return init_custom_process_group(
                self.backend, 0, world, self.group_name, deadline, rendezvous=rendezvous, device=self._device
            )

        try:
            self._group = self._together(self._init(spec), here, deadline, rendezvous.close)
        except BaseException:
            rendezvous.close()
            raise

    def update(self, bucket: Bucket, last: bool, deadline: Deadline) -> None:
        """Send one bucket; returns when the engine has loaded it."""
        group = self._group
        if group is None or group.closed:
            raise ConfigurationError(f"no group with {self.url}: join first")

        def cancel() -> None:
            group.close()
            self._leave_remote(Deadline(_CLEANUP_SECONDS))

        self._together(self._bucket(bucket.specs, last), lambda: self._send(group, bucket, deadline), deadline, cancel)

    def _send(self, group: ProcessGroup, bucket: Bucket, deadline: Deadline) -> None:
        memory = bucket.memory[: sum(spec.nbytes for spec in bucket.specs)]
        group.broadcast([memory if self._device is None else memory.to(self._device)], deadline)

    def _together(self, call: HttpCall, collective: Callable[[], T], deadline: Deadline, cancel: Callable[[], None]) -> T:
        """Run a request and the collective that pairs with it; the first that fails ends the other.

        Where the request is refused nobody will take part in the collective: ``cancel`` ends it, so that this side does not wait.
        """
        what = f"{call.path} at {self.url}"
        request = self._threads.submit(self.call, call, deadline)
        moving = self._threads.submit(collective)
        try:
            done, _ = wait((request, moving), timeout=deadline.remaining(what), return_when=FIRST_COMPLETED)
            if moving in done and moving.exception() is not None and request not in done:
                # The engine may know better why; but one that went away says nothing.
                wait((request,), timeout=min(2.0, deadline.remaining(what)))
            if request.done():
                request.result()
            result = moving.result(deadline.remaining(what))
            request.result(deadline.remaining(what))
            return result
        except BaseException as error:
            if not moving.done():
                cancel()
                wait((moving, request), timeout=_CLEANUP_SECONDS)
            if moving.done() and moving.exception() is None:
                self._undo(moving.result())
            if isinstance(error, TimeoutError) and not isinstance(error, WeightSyncError):
                raise DeadlineExceeded(f"{what} did not finish within {deadline.seconds:g} s") from error
            raise

    def _undo(self, result: object) -> None:
        """A group that came about here only, not at the engine."""
        if isinstance(result, ProcessGroup):
            result.close()

    def _leave_remote(self, deadline: Deadline) -> None:
        call = self._destroy()
        if call is not None:
            with suppress(WeightSyncError):  # what matters is raised already, and a group that is gone is as good
                self.call(call, deadline)

    def call(self, call: HttpCall, deadline: Deadline) -> Any:  # noqa: ANN401 - JSON
        """Send one request; its answer, decoded. Raises for any answer that is not a success."""
        what = f"{call.method} {call.path} at {self.url}"
        seconds = deadline.remaining(what)
        try:
            with self._http.stream(call.method, call.path, json=call.json, timeout=httpx.Timeout(seconds)) as answer:
                body = bytearray()
                for chunk in answer.iter_bytes():
                    body += chunk
                    deadline.remaining(what)
                    if len(body) > _MAX_REPLY:
                        raise ProtocolError(f"{what}: an answer of more than {_MAX_REPLY} bytes")
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{what} had no answer within {deadline.seconds:g} s") from error
        except httpx.HTTPError as error:
            raise PeerLost(f"{what} failed: {str(error) or type(error).__name__}") from error
        return self._read(what, answer.status_code, bytes(body))

    def _read(self, what: str, status: int, body: bytes) -> Any:  # noqa: ANN401 - JSON
        try:
            decoded = msgspec.json.decode(body) if body else None
        except UNREADABLE:
            decoded = body.decode(errors="replace")[:500]
        message = decoded
        if isinstance(decoded, dict):
            message = decoded.get("message", decoded.get("error", decoded.get("detail", decoded)))
        if status in (401, 403):
            raise AuthenticationError(f"{what}: {status} {message}")
        if status >= 300 or (isinstance(decoded, dict) and decoded.get("success") is False):
            kind, colon, text = str(message).partition(": ")
            known = from_wire(kind, f"{what}: {text}") if colon else None
            if known is not None and type(known) is not WeightSyncError:
                raise known
            raise LoadError(f"{what}: {status} {message}")
        return decoded

    def leave(self, deadline: Deadline) -> None:
        """Destroy the group at both ends."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
            self._leave_remote(deadline)

    def close(self) -> None:
        """Destroy the group, and let go of connections and threads. In a forked child: nothing."""
        if self._origin.elsewhere:
            return
        self.leave(Deadline(_CLEANUP_SECONDS))
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
