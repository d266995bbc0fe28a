"""Which versions of a run a store has, and what of it may be removed."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from weightsync import failpoints
from weightsync.errors import AuthenticationError, ConfigurationError, ProtocolError, StaleSource
from weightsync.store.objects import ObjectStore
from weightsync.store.signing import StoredVersion, opened

_log = logging.getLogger(__name__)

GRACE_SECONDS = 3600.0
"""An object that no version needs may belong to one that is being written. It is kept for so long."""

_MANIFEST = re.compile(r"([0-9]{10})\.([0-9]{19})\.manifest")
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_MOST_MANIFEST = 1 << 30


def folder_of(run: str) -> str:
    """Folder of a run: its id, or a hash of one that is no plain file name. Manifests say whose they are."""
    return run if _PLAIN.fullmatch(run) else f"run-{hashlib.blake2b(run.encode(), digest_size=16).hexdigest()}"


def manifest_path(run: str, order: tuple[int, int]) -> str:
    """Path of the manifest of the version with this epoch and number."""
    return f"{folder_of(run)}/versions/{order[0]:010d}.{order[1]:019d}.manifest"


def new_object_path(run: str, order: tuple[int, int], rank: int) -> str:
    """A path that no object has: what was written is never changed."""
    return f"{folder_of(run)}/objects/{order[0]}.{order[1]}.{rank}-{secrets.token_hex(8)}.safetensors"


def orders(store: ObjectStore, run: str) -> list[tuple[int, int]]:
    """Epoch and number of each version that the store lists, ascending."""
    return list(_manifests(store, run))


def why_empty(store: ObjectStore, run: str | None) -> str:
    """Say why no version of ``run``, or of any run, is listed. Raises :class:`TransportError` if the store cannot be listed."""
    if os.path.isabs(store.url) and not os.path.exists(store.url):
        return f"there is no folder {store.url}"
    others = ", ".join(sorted(set(store.folders()) - {folder_of(run or "")}))
    which = f" version of run {run}" if run else " versions: is it the trainer's?"
    return f"the store {store.url} has no{which}{f', but of {others}' if others else ''}"


def _manifests(store: ObjectStore, run: str) -> dict[tuple[int, int], datetime]:
    """When the manifest of each version was written."""
    listed = ((_MANIFEST.fullmatch(item.path.rpartition("/")[2]), item) for item in store.list(f"{folder_of(run)}/versions"))
    return dict(sorted(((int(name[1]), int(name[2])), item.modified) for name, item in listed if name is not None))


def load(store: ObjectStore, run: str, order: tuple[int, int], public: bytes) -> StoredVersion:
    """Read and verify the manifest of a version.

    Raises:
        StaleSource: There is no such version.
        AuthenticationError: It was not signed with the run's key ``public``.
        ProtocolError: It contradicts itself, or is too large.
    """
    path = manifest_path(run, order)
    size = store.size(path)
    return opened(store.read(path, 0, min(size, _MOST_MANIFEST)), public, run, order)


def newest(store: ObjectStore, run: str, public: bytes) -> StoredVersion | None:
    """Return the newest version with a manifest that the run's key signed; ``None`` if there is none.

    Raises:
        TransportError: The store cannot be read.
    """
    for order in reversed(orders(store, run)):
        try:
            return load(store, run, order, public)
        except (AuthenticationError, ProtocolError, StaleSource) as error:
            _log.warning("version %d of epoch %d in the store %s is passed over: %s", order[1], order[0], store.url, error)
    return None


class Removed(NamedTuple):
    """What garbage collection removed."""

    versions: tuple[tuple[int, int], ...]
    objects: int
    nbytes: int
    young: int
    """Objects that no version needs and that stay, because they are younger than the time of grace."""


def collect_garbage(
    store: ObjectStore, run: str, public: bytes, keep: int, *, grace: float = GRACE_SECONDS, dry_run: bool = False
) -> Removed:
    """Remove all but the newest ``keep`` versions of a run, then what no version needs that is left.

    What a version needs stays, however old: its manifest names every object of its chains. Manifests go first, so that no version
    is listed that lacks an object. The newest version of any epoch stays for ``grace`` seconds: its trainer may be writing changes
    since then. Without ``grace`` seconds, nothing may be writing.

    Raises:
        ConfigurationError: ``keep`` is below one.
        WeightSyncError: A manifest that stays cannot be read or was not signed with the run's key. Then nothing is removed: what it
            needs is not known.
    """
    if keep < 1:
        raise ConfigurationError(f"at least one version must be kept, not {keep}")
    before = datetime.now(UTC) - timedelta(seconds=grace)
    listed = _manifests(store, run)
    last = {order[0]: order for order in listed}.values()
    kept = {*list(listed)[-keep:], *(order for order in last if grace and listed[order] >= before)}
    needed = {path for order in kept for path in load(store, run, order, public).objects}
    unneeded = [
        item
        for item in store.list(folder_of(run))
        if ("/objects/" in item.path or "#" in item.path)  # obstore's name of a file that it was writing
        and kept and item.path not in needed
    ]  # fmt: skip
    garbage = [item for item in unneeded if item.modified < before or not grace]
    dropped = tuple(order for order in listed if order not in kept)
    if not dry_run:
        for order in dropped:
            store.delete(manifest_path(run, order))
        failpoints.reached("store.manifests_removed")
        for item in garbage:
            store.delete(item.path)
    return Removed(dropped, len(garbage), sum(item.nbytes for item in garbage), len(unneeded) - len(garbage))
