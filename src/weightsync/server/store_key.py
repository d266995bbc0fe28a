"""The key that signs a run's stored versions, kept beside the history of rounds so that it outlives the coordinator."""

from __future__ import annotations

from pathlib import Path

from weightsync.config import ServerSettings
from weightsync.protocol.tokens import kept_secret
from weightsync.store.catalog import folder_of
from weightsync.store.signing import SigningKey, new_secret


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


def _path(settings: ServerSettings, run: str) -> Path | None:
    folder = settings.history_directory
    return None if folder is None else folder / "store-keys" / folder_of(run)
