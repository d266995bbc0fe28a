"""A coordinator's store: the key that signs versions, kept beside the history of rounds; and the newest version."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from weightsync.config import ServerSettings
from weightsync.coordinator.stored_versions import StoredVersions
from weightsync.daemon_threads import in_daemon_thread
from weightsync.errors import WeightSyncError
from weightsync.protocol.tokens import kept_secret
from weightsync.store.catalog import folder_of, newest
from weightsync.store.objects import ObjectStore
from weightsync.store.signing import SigningKey, new_secret

_log = logging.getLogger(__name__)
_SECONDS = 30.0


def store_key(settings: ServerSettings, run: str) -> SigningKey:
    """Return the key that was given, or that of the run, which is made once. Without a state folder it is a new one.

    Raises:
        ConfigurationError: The key is none, or cannot be kept.
        AuthenticationError: Other users could have written the key.
    """
    if settings.store_key is not None:
        return SigningKey(settings.store_key)
    path = _path(settings, run)
    return SigningKey(new_secret() if path is None else kept_secret(path, new_secret))


def kept_key(settings: ServerSettings, run: str) -> SigningKey | None:
    """Return the key that was given, or that this user keeps of the run; ``None`` if there is none."""
    path = _path(settings, run)
    return store_key(settings, run) if settings.store_key is not None or (path is not None and path.exists()) else None


async def adopt_newest(url: str, run: str, versions: StoredVersions) -> str:
    """Let ``versions`` know the newest version of the run in the store. Returns why that could not be read; empty if it was."""
    reading = in_daemon_thread(lambda: newest(ObjectStore(url), run, versions.key.public), "weightsync-store-newest")
    try:
        stored = await asyncio.wait_for(asyncio.wrap_future(reading), _SECONDS)
    except (WeightSyncError, TimeoutError) as error:
        why = str(error) or "it does not answer"
        _log.warning("no replica can be updated from the store %s yet: %s", url, why)
        return why
    if stored is not None and versions.newest is None:  # the trainer may have stored a later one since
        versions.adopt(stored, url)
    return ""


def _path(settings: ServerSettings, run: str) -> Path | None:
    folder = settings.history_directory
    return None if folder is None else folder / "store-keys" / folder_of(run)
