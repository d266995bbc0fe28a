"""A store in virtual time: what obstore does for :class:`weightsync.store.objects.ObjectStore`, and all that a store does wrong."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec import msgpack, structs
from obstore.exceptions import AlreadyExistsError, GenericError
from tests.simulation.threads import threads

from weightsync.model import Version
from weightsync.model.stored import VersionManifest
from weightsync.store.catalog import manifest_path
from weightsync.store.signing import SigningKey, new_secret

if TYPE_CHECKING:
    from tests.simulation.ranks import Process
    from tests.simulation.store_world import StoreWorld

__all__ = ["RUN", "SIGNED_BODY", "STORE_FAULTS", "STORE_URL", "SimulatedBucket"]

STORE_URL = "s3://bucket/versions"
RUN = "simulated"

_FAILS, _HANGS, _SLOW, _FULL = "store fails", "store hangs", "store is slow", "store is full"
_LATE, _LOST, _LESS, _FLIPS = "store lists late", "store loses answers", "store keeps less than it was given", "store flips bits"
_CHANGED, _REMOVED, _FORGED, _MOVED = "object changed", "object removed", "manifest forged", "manifest moved"
STORE_FAULTS = (_FAILS, _HANGS, _SLOW, _FULL, _LATE, _LOST, _LESS, _FLIPS, _CHANGED, _REMOVED, _FORGED, _MOVED)
"""The first eight for some seconds, the others for good."""

_CALL_SECONDS = 0.003
_FORGED_STEP = 500  # versions above the newest one: the trainer never gets there
SIGNED_BODY = 72
"""Where the body of a manifest begins."""


@dataclass
class _Kept:
    data: bytes
    modified: float


class SimulatedBucket:
    """Objects in memory. Each call takes time, if a simulated thread makes it."""

    def __init__(self, world: StoreWorld, seed: int) -> None:
        self._world = world
        self._draw = random.Random(f"bucket {seed}")
        self._until: dict[str, float] = {}
        self.files: dict[str, _Kept] = {}
        self.spoiled: set[str] = set()
        """Paths of what is not what was written."""
        self.troubled_until = 0.0
        self.flipping: Process | None = None
        """What this process reads next is wrong."""

    # Faults.

    def strike(self, name: str, seconds: float) -> None:
        """Let a fault begin, or happen."""
        if self._world.calm:
            return
        manifests = [path for path in sorted(self.files) if path.endswith(".manifest") and path not in self.spoiled]
        objects = [path for path in sorted(self.files) if path.endswith(".safetensors")]
        if name in STORE_FAULTS[:8]:
            self._until[name] = self._world.loop.time() + seconds
            self.troubled_until = max(self.troubled_until, self._until[name])
        elif name in (_CHANGED, _REMOVED) and objects:
            self._spoil(self._draw.choice(objects[-3:]), name == _CHANGED)
        elif name in (_FORGED, _MOVED) and manifests:
            self._forge(manifests[-1], name == _FORGED)
        else:
            return
        self._world.hit(name)

    def _spoil(self, path: str, changed: bool) -> None:
        self.spoiled.add(path)
        if changed:
            self.files[path].data = self._flipped(self.files[path].data)
        else:
            del self.files[path]

    def _forge(self, newest: str, forged: bool) -> None:
        """A later version: the manifest of the newest one under another number, signed by another key, or moved there."""
        body = msgpack.decode(self.files[newest].data[SIGNED_BODY:], type=VersionManifest)
        version = body.version
        order = version.epoch, version.number + _FORGED_STEP
        data = self.files[newest].data
        if forged:
            later = Version(version.run, order[1], version.manifest, version.digest, version.epoch)
            data = SigningKey(new_secret()).signed(structs.replace(body, version=later))
        path = manifest_path(RUN, order)
        self.spoiled.add(path)
        self.files[path] = _Kept(data, self._world.wall())

    def _active(self, name: str) -> bool:
        if self._world.calm or threads().current is None:  # where nobody can wait, a trainer is being made
            return False
        return self._world.loop.time() < self._until.get(name, 0.0)

    def _flipped(self, data: bytes) -> bytes:
        wrong = bytearray(data)
        if wrong:
            at = len(wrong) - 1 - self._draw.randrange(min(len(wrong), 150))  # not in a header, most of which nobody reads
            wrong[at] ^= 1 << self._draw.randrange(8)
        return bytes(wrong)

    def intact(self, version: VersionManifest) -> bool:
        """Whether nobody spoiled what a version needs."""
        paths = [manifest_path(RUN, version.version.order), *(item.path for rank in version.ranks for item in rank.chain)]
        return self.spoiled.isdisjoint(paths)

    # What obstore does.

    @contextmanager
    def _call(self) -> Iterator[None]:
        now = self._world.loop.time()
        if threads().current is not None:
            threads().sleep(self._draw.expovariate(1 / _CALL_SECONDS) + self._active(_SLOW) * self._draw.uniform(0.1, 3.0))
            if self._active(_HANGS):
                threads().sleep(self._until[_HANGS] - now)
            if self._active(_FAILS):
                raise GenericError("the simulated store fails")
        yield
        if self._active(_LOST) and self._draw.random() < 0.5:
            raise GenericError("the answer of the simulated store is lost")

    def put(self, _store: object, path: str, data: bytes | Iterable[bytes], *, mode: str = "overwrite", **_: object) -> None:
        """See obstore."""
        if not isinstance(data, bytes):
            data = b"".join(data)
        with self._call():
            if self._active(_FULL):
                raise GenericError("the simulated store is full")
            if mode == "create" and path in self.files:
                raise AlreadyExistsError(path)
            if self._active(_LESS) and self._draw.random() < 0.5:
                self.spoiled.add(path)
                data = data[: self._draw.randrange(len(data))]
            self.files[path] = _Kept(data, self._world.wall())

    def get_range(self, _store: object, path: str, *, start: int, end: int) -> bytes:
        """See obstore."""
        with self._call():
            data = self._file(path).data[start:end]
        reader = threads().process()
        if (self.flipping is not None and reader is self.flipping) or (self._active(_FLIPS) and self._draw.random() < 0.5):
            self.flipping = None
            return self._flipped(data)
        return data

    def head(self, _store: object, path: str) -> dict[str, int]:
        """See obstore."""
        with self._call():
            return {"size": len(self._file(path).data)}

    def list(self, _store: object, prefix: str | None = None) -> Iterator[list[dict[str, object]]]:
        """See obstore."""
        with self._call():
            until = self._world.wall() - self._draw.uniform(0.0, 60.0) if self._active(_LATE) else float("inf")
            page: list[dict[str, object]] = [
                {"path": path, "size": len(kept.data), "last_modified": self.date(kept.modified)}
                for path, kept in sorted(self.files.items())
                if path.startswith(f"{prefix}/") and kept.modified <= until
            ]
        yield page

    def list_with_delimiter(self, _store: object) -> dict[str, Sequence[str]]:
        """See obstore."""
        with self._call():
            return {"common_prefixes": sorted({path.partition("/")[0] for path in self.files})}

    def delete(self, _store: object, path: str) -> None:
        """See obstore."""
        with self._call():
            self.files.pop(path, None)

    def _file(self, path: str) -> _Kept:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    @staticmethod
    def date(seconds: float) -> datetime:
        """Wall-clock time."""
        return datetime.fromtimestamp(seconds, UTC)
