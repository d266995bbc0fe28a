"""State of an externally updated server: its groups, the running update, and whether the engine may resume."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec
import numpy as np

from weightsync import errors, failpoints
from weightsync.arrays import Bools
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, LoadError, MembershipError, VerificationError, VersionError, WeightSyncError
from weightsync.model import Manifest, PauseMode, Version, fold, label_of
from weightsync.protocol.messages import Body, Commit, Done, Pause, Quarantine, Resume
from weightsync.protocol.update_messages import Describe, Described, Digested, LeaveGroup, Verify
from weightsync_disaggregated import checks, requests
from weightsync_disaggregated.ranks import Ranks, ask_all

_Claims = requests.UpdateRequest | requests.CommitRequest
"""Says what the sender's digests are."""
T = TypeVar("T")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an externally updated server."""

    pause_mode: PauseMode = "abort"
    """What happens to running requests, unless the update says it."""
    packing: checks.Packing = "elements"
    """What a flattened bucket is: ``elements`` as LMDeploy has it, ``bytes`` as SGLang."""
    max_bucket_bytes: int = 4 << 30
    """Bytes of one bucket, unless it is a single tensor."""
    init_timeout: float = 120.0
    """Seconds for a group to come about."""
    bucket_timeout: float = 300.0
    """Seconds from a bucket's request to its answer."""
    update_timeout: float = 3600.0
    """Seconds from the begin of an update to its end."""
    leave_timeout: float = 30.0
    """Seconds for ranks to leave a group, or to stop after a failure."""
    max_groups: int = 16
    require_digest: bool = False
    """Refuse to commit what the sender gave no digest for."""
    networks: tuple[str, ...] = ()
    """Where a group's rendezvous may be (``192.0.2.0/24``, ...); empty: anywhere."""

    def __post_init__(self) -> None:
        checks.check_networks(self.networks)


class _OpenUpdate:
    """One update that runs. ``number`` is in all of its calls."""

    def __init__(self, number: int, tensors: int, deadline: Deadline, begin: requests.BeginRequest, *, explicit: bool) -> None:
        self.number, self.deadline, self.explicit = number, deadline, explicit
        self.partial, self.label = begin.partial, begin.weight_version
        self.known = np.zeros(tensors, np.bool_)
        self.error: str | None = None
        self.busy = 0

    def check_failure(self) -> None:
        """Raise :class:`~weightsync.errors.ConfigurationError` if a bucket of this update failed."""
        if self.error is not None:
            raise ConfigurationError(f"this update failed ({self.error}): end or abort it, then send everything again")


class _GroupState:
    """One group of a name; a later one of the same name is another."""

    def __init__(self) -> None:
        self.state: Literal["joining", "ready", "busy"] = "joining"


class WeightUpdates:
    """The operations behind the routes. Every method raises a :class:`~weightsync.errors.WeightSyncError` if it refuses.

    What is refused before anything happened leaves everything as it was. What fails later leaves the engine *dirty*: paused, with
    no version, until an update is committed. Used on one event loop.
    """

    def __init__(self, ranks: Ranks, settings: Settings = Settings(), run: str = "disaggregated") -> None:  # noqa: B008 - frozen
        self._ranks, self.settings, self._run = ranks, settings, run
        self._manifest: Manifest | None = None
        self._backends: frozenset[str] = frozenset()
        self._groups: dict[str, _GroupState] = {}
        self._lock = asyncio.Lock()
        self._update: _OpenUpdate | None = None
        self._dirty: str | None = None
        self._last: Version | None = None
        self._committed = checks.Committed()

    @property
    def version(self) -> Version | None:
        """What the engine serves; ``None`` before the first update, during one, and after one that failed."""
        return self._last if self._update is None and self._dirty is None else None

    async def _tell(self, body: Body, timeout: float, update: int = 0) -> None:
        await ask_all(self._ranks, body, timeout, Done, update)

    async def manifest(self) -> Manifest:
        """The tensors that may arrive; asked of the ranks once. Raises if they disagree."""
        if self._manifest is None:
            described = await ask_all(self._ranks, Describe(), self.settings.init_timeout, Described)
            first = Manifest(described[0].tensors)
            for rank, other in enumerate(described[1:], 1):
                first.check_same(Manifest(other.tensors), f"engine rank {rank}")
            self._backends = frozenset(described[0].backends).intersection(*(other.backends for other in described))
            self._manifest = first
        return self._manifest

    async def state(self) -> requests.UpdateState:
        """Where the engine stands."""
        manifest, update = await self.manifest(), self._update
        late = self._overdue()
        return requests.UpdateState(
            state="dirty" if self._dirty is not None or late else "updating" if update is not None else "serving",
            weight_version=None if self.version is None else str(self.version),
            digest=None if self.version is None else self.version.digest,
            manifest=manifest.fingerprint,
            tensors=len(manifest),
            received=0 if update is None else int(update.known.sum()),
            groups=tuple(sorted(name for name, group in self._groups.items() if group.state != "joining")),
            error=late or self._dirty or (None if update is None else update.error),
        )

    async def init_group(self, request: requests.InitGroupRequest) -> str:
        """All ranks join a group; all, or none stays in it."""
        await self.manifest()
        checks.check_group(request, self._ranks.count, self._groups, self._backends)
        checks.check_address(request.master_address, self.settings.networks)
        if len(self._groups) >= self.settings.max_groups:
            raise ConfigurationError(f"{len(self._groups)} groups are initialized already; destroy one first")
        timeout = min(request.timeout or self.settings.init_timeout, self.settings.init_timeout)
        name = request.group_name
        group = self._groups[name] = _GroupState()
        try:
            await self._tell(request.message(), timeout)
        except BaseException:
            with suppress(WeightSyncError):  # the failure to join says more
                await self._leave(name)
            raise
        group.state = "ready"
        return f"group {name!r} is initialized: ranks {request.rank_offset} to {request.rank_offset + self._ranks.count - 1}"

    async def destroy(self, request: requests.DestroyRequest) -> str:
        """All ranks leave a group; a collective that runs is aborted where the backend can."""
        self._known_group(request.group_name)
        failpoints.reached("updates.destroy")
        await self._leave(request.group_name)
        return f"group {request.group_name!r} is destroyed"

    async def _leave(self, name: str) -> None:
        try:
            await self._tell(LeaveGroup(name), self.settings.leave_timeout)
        finally:
            self._groups.pop(name, None)

    def _known_group(self, name: str) -> _GroupState:
        group = self._groups.get(name)
        if group is None or group.state == "joining":
            known = ", ".join(sorted(self._groups)) or "none"
            raise MembershipError(f"group {name!r} is not initialized; initialized: {known}")
        return group

    async def check(self, request: requests.CheckRequest) -> str:
        """Look whether an update would be taken; nothing is paused."""
        manifest = await self.manifest()
        checks.check_tensors(request.tensors, manifest, partial=request.partial)
        self._parse(request.weight_version)
        return f"an update of these {len(request.tensors.names)} tensors fits"

    async def begin(self, request: requests.BeginRequest) -> str:
        """Pause the engine for an update of several requests."""
        manifest = await self.manifest()
        if request.manifest not in (None, manifest.fingerprint):
            raise errors.ManifestMismatch(
                f"the sender's manifest is {request.manifest}, the engine's {manifest.fingerprint}: other tensors"
            )
        if request.tensors is not None:
            checks.check_tensors(request.tensors, manifest, partial=request.partial)
        self._parse(request.weight_version)
        failpoints.reached("updates.begin")
        async with self._lock:
            self._drop_overdue()
            if self._update is not None and self._update.error is None:
                raise ConfigurationError("an update runs already; commit or abort it first")
            if request.partial and (self._dirty is not None or self._last is None):
                raise ConfigurationError("a partial update needs an engine whose last update was committed; send all tensors")
            await self._open(request, explicit=True)
        return "the engine is paused and takes an update"

    async def _open(self, request: requests.BeginRequest, *, explicit: bool) -> _OpenUpdate:
        if sum(group.state == "busy" for group in self._groups.values()) > (not explicit):
            raise ConfigurationError("a bucket of an earlier update still arrives; destroy its group, or wait for its answer")
        limit = self.settings.update_timeout
        deadline = Deadline(min(request.timeout or limit, limit))
        pausing = min(deadline.remaining("pausing"), self.settings.bucket_timeout)
        self._update, number = None, secrets.randbits(63)
        try:
            await self._tell(Pause(request.mode or self.settings.pause_mode), pausing, number)
        except BaseException as error:
            self._fail(f"pausing failed: {error}")
            raise
        tensors = len(await self.manifest())
        self._update = _OpenUpdate(number, tensors, deadline, request, explicit=explicit)
        return self._update

    async def update(self, request: requests.UpdateRequest) -> str:
        """Receive and load one bucket; with ``finished`` commit what came, unless the update was begun explicitly."""
        manifest = await self.manifest()
        group = self._known_group(request.group_name)
        tensors = checks.check_bucket(request, manifest, self.settings.max_bucket_bytes, self.settings.packing)
        self._parse(request.weight_version)
        if group.state == "busy":
            raise ConfigurationError(f"group {request.group_name!r} carries another bucket: one at a time, or use another group")
        failpoints.reached("updates.bucket")
        group.state = "busy"
        try:
            async with self._lock:
                update = await self._update_of(request, manifest, tensors)
                update.busy += 1
            try:
                if tensors:
                    await self._receive(request, tensors, update, group)
            finally:
                update.busy -= 1
            if not request.finished:
                return f"received and loaded {len(tensors)} tensors"
            return await self._commit(update, request)
        finally:
            group.state = "ready"

    async def _update_of(self, request: requests.UpdateRequest, manifest: Manifest, tensors: tuple[int, ...]) -> _OpenUpdate:
        """The update that a bucket belongs to; the first one begins it. Refuses what would make a commit after it impossible."""
        self._drop_overdue()
        update = self._update
        if update is not None:
            update.check_failure()
        if request.finished:
            if update is not None and update.explicit:
                raise ConfigurationError("this update was begun explicitly: commit or end it explicitly, not by finished=true")
            known = np.zeros(len(manifest), np.bool_) if update is None else update.known.copy()
            known[list(tensors)] = True
            self._check_claims(manifest, known, request, partial=False)
        if update is None:
            update = await self._open(requests.BeginRequest(), explicit=False)
        update.label = request.weight_version or update.label
        return update

    async def _receive(
        self, request: requests.UpdateRequest, tensors: tuple[int, ...], update: _OpenUpdate, group: _GroupState
    ) -> None:
        limit = min(request.timeout or self.settings.bucket_timeout, self.settings.bucket_timeout)
        timeout = min(limit, update.deadline.remaining("the update"))
        try:
            await self._tell(request.message(tensors), timeout, update.number)
            if self._update is not update:
                raise ConfigurationError("the update ended while this bucket arrived; the bucket is part of no other")
        except BaseException as error:
            update.error = str(error) or type(error).__name__
            if self._update is update:  # another that was begun since is not touched by it
                self._fail(update.error, end=not update.explicit)
            # After a loader's error all ranks still stand at the same collective.
            if not isinstance(error, LoadError) and self._groups.get(request.group_name) is group:
                with suppress(WeightSyncError):  # what made the bucket fail says more
                    await self._leave(request.group_name)
            raise
        update.known[list(tensors)] = True

    async def commit(self, request: requests.CommitRequest) -> str:
        """Verify, finalize, flush, label, resume."""
        async with self._lock:
            update = self._running()
        update.check_failure()
        update.label = request.weight_version or update.label
        return await self._commit(update, request)

    async def end(self) -> str:
        """SGLang's end: a commit of what came, or the end of an update that failed."""
        async with self._lock:
            update = self._running()
            if update.error is not None:
                self._update = None
                return f"the update that failed ({update.error}) is over; the engine stays paused until one is committed"
        try:
            return await self._commit(update, requests.CommitRequest())
        except WeightSyncError as error:
            if self._update is update:  # refused, not failed: SGLang's end ends it all the same
                self._fail(str(error))
            raise

    async def abort(self) -> str:
        """Give the update up; the engine stays paused."""
        failpoints.reached("updates.abort")
        async with self._lock:
            self._running()
            self._fail("the last update was aborted")
        return "the update is aborted; the engine stays paused until one is committed"

    async def _commit(self, update: _OpenUpdate, claims: _Claims) -> str:
        manifest = await self.manifest()
        failpoints.reached("updates.commit")
        async with self._lock:
            if self._update is not update:
                raise ConfigurationError("the update has ended")
            if update.busy:
                raise ConfigurationError("a bucket of this update still arrives; commit it when all are answered")
            self._check_claims(manifest, update.known, claims, partial=update.partial)
            name = self._parse(update.label)
            try:
                return await self._finalize(update, manifest, name, claims)
            except BaseException as error:
                self._fail(str(error) or type(error).__name__)
                with suppress(WeightSyncError):  # a rank that cannot be paused is already reported
                    # One rank may have resumed before another failed to.
                    await self._tell(Quarantine("the update failed"), self.settings.leave_timeout, update.number)
                raise

    async def _finalize(self, update: _OpenUpdate, manifest: Manifest, name: tuple[str, int, int], claims: _Claims) -> str:
        wrong, whole = [], []
        held = await self._step(update, Verify(), Digested)
        for rank, answer in enumerate(held):
            values = np.frombuffer(answer.digests, "<u8").astype(np.uint64)
            if len(values) != len(manifest):
                raise VerificationError(f"rank{rank}: {len(values)} digests for {len(manifest)} tensors")
            try:
                checks.check_digests(manifest, values, update.known, claims.digest, claims.digests)
                whole.append(self._committed.complete(manifest, values, update.known))
            except VerificationError as error:
                wrong.append(f"rank{rank}: {error}")
        if wrong:
            raise VerificationError(" | ".join(wrong))
        folds = [fold(digests) for digests in whole]
        if len(set(folds)) > 1:
            what = " | ".join(f"rank{rank}: {digest}" for rank, digest in enumerate(folds))
            raise VerificationError(f"engine ranks hold different bytes: {what}")
        run, number, epoch = name
        version = Version(run, number, manifest.fingerprint, folds[0], epoch)
        verified = claims.digest is not None or claims.digests is not None
        installed = all(answer.installed for answer in held)
        failpoints.reached("updates.verified")
        await self._step(update, Commit(version), Done)
        failpoints.reached("updates.finished")
        await self._step(update, Resume(), Done)
        rest = self._committed.describe_rest(update.known, self._last, read_again=installed)
        self._committed.take(whole[0], update.known, verified=verified)
        self._update, self._dirty, self._last = None, None, version
        how = "not verified: no digest was given" if not verified else f"verified as {'installed' if installed else 'received'}"
        return f"version {version} with {int(update.known.sum())} tensors, {how}{rest}"

    async def _step(self, update: _OpenUpdate, body: Body, kind: type[T]) -> list[T]:
        """A step of the commit. Raises :class:`~weightsync.errors.DeadlineExceeded` if the update has no time left for it."""
        timeout = min(update.deadline.remaining("the update"), self.settings.bucket_timeout)
        return await ask_all(self._ranks, body, timeout, kind, update.number)

    def _check_claims(self, manifest: Manifest, known: Bools, claims: _Claims, *, partial: bool) -> None:
        """Refuse to commit nothing, less than everything, or what the sender says too little or too much of."""
        if not known.any():
            raise ConfigurationError("not one tensor was received: there is nothing to commit")
        missing = [spec.name for spec, received in zip(manifest, known, strict=True) if not received]
        if missing and not partial:
            raise ConfigurationError(
                f"{len(missing)} of {len(manifest)} tensors were not received: {errors.few(missing)}; send them first"
            )
        if claims.digests is not None:
            checks.check_named(manifest, known, claims.digests)
        elif claims.digest is None and self.settings.require_digest:
            raise ConfigurationError("this server commits nothing without a digest; give digest or digests")

    def _parse(self, label: str | None) -> tuple[str, int, int]:
        last = self._last
        if last is None:
            return checks.parse_version(label, self._run, -1)
        run, number, epoch = checks.parse_version(label, last.run, last.number, last.epoch)
        if run == last.run and (epoch, number) < last.order:
            raise VersionError(f"version {label_of(run, epoch, number)} is older than {last}, which was committed here")
        return run, number, epoch

    def _running(self) -> _OpenUpdate:
        self._drop_overdue()
        if self._update is None:
            raise ConfigurationError("no update runs; begin one first")
        return self._update

    def _overdue(self) -> str | None:
        if self._update is None or self._update.deadline.left > 0:
            return None
        return f"the update did not finish within {self._update.deadline.seconds:g} s"

    def _drop_overdue(self) -> None:
        late = self._overdue()
        if late is not None:
            self._fail(late)

    def _fail(self, why: str, *, end: bool = True) -> None:
        """The engine stays paused, without a version. With ``end`` the update is over; otherwise its sender has to end it."""
        self._dirty = why
        if end:
            self._update = None
