"""Objects of a store by path, in a folder or in S3, over obstore (extra ``[store]``).

Files below a folder that others can write, too. Nothing leaves it by a link, and only regular files are opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from weightsync.errors import ConfigurationError, StaleSource, TransportError, TransportUnavailable

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # opening a pipe does not wait for its other end


class LocalFiles:
    """Reads, lists and removes files by path below ``root``, which may be a link itself.

    Each folder is opened from the one above it and not by its path, so it does not matter what takes its place meanwhile.
    Methods raise ``OSError``, also where a folder or a file is a link or no regular file.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    @contextmanager
    def folder(self, path: str) -> Iterator[int]:
        """Open a folder."""
        here = os.open(self._root, _FOLDER)
        try:
            for name in filter(None, path.split("/")):
                if name in (".", ".."):
                    raise OSError(f"{path} is no path below it")
                above, here = here, os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
                os.close(above)
            yield here
        finally:
            os.close(here)

    @contextmanager
    def _file(self, path: str) -> Iterator[int]:
        above, _, name = path.rpartition("/")
        with self.folder(above) as folder:
            file = os.open(name, _FILE, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(f"{path} is no regular file")
            yield file
        finally:
            os.close(file)

    def read(self, path: str, first: int, last: int) -> bytearray:
        """Return bytes ``first <= i < last`` of a file, or fewer if it is shorter."""
        with self._file(path) as file:
            data = bytearray(max(min(last, os.fstat(file).st_size) - first, 0))
            done = 0
            while done < len(data):
                count = os.preadv(file, [memoryview(data)[done:]], first + done)
                if not count:
                    break
                done += count
        return data[:done] if done < len(data) else data

    def size(self, path: str) -> int:
        """Return the bytes of a file."""
        with self._file(path) as file:
            return os.fstat(file).st_size

    def list(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """Iterate over the regular files below a folder, which need not exist."""
        folders = [path]
        while folders:
            above = folders.pop()
            with suppress(FileNotFoundError), self.folder(above) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    below = f"{above}/{entry.name}" if above else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(below)
                    elif entry.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):  # it was removed right now; the others are there
                            yield below, entry.stat(follow_symlinks=False)

    def delete(self, path: str) -> None:
        """Remove a file. A link is removed itself."""
        above, _, name = path.rpartition("/")
        with self.folder(above) as folder:
            os.unlink(name, dir_fd=folder)


_REQUEST_SECONDS = 60
_CONNECT_SECONDS = 5
_RETRIES = 2
_NOTE_PATH, _NOTE = "weightsync.txt", b"Versions of models, written by weightsync. List them with `weightsync store ls`.\n"
_PART_BYTES, _PARTS_AT_ONCE = 8 << 20, 2


def missing_library() -> str | None:
    """Return what to install if stores cannot be used; ``None`` if they can."""
    return None if find_spec("obstore") else "obstore is not installed: pip install 'weightsync[store]'"


class Listed(NamedTuple):
    """An object as a listing shows it."""

    path: str
    nbytes: int
    modified: datetime


class ObjectStore:
    """The store at ``url``: an absolute path, ``file:///path`` or ``s3://bucket/prefix``.

    Objects appear whole or not at all. Credentials and endpoint of S3 come from the usual ``AWS_`` variables, never from ``url``.
    In a folder, no link below it is followed. Thread-safe.

    Raises:
        ConfigurationError: ``url`` is neither.
        TransportUnavailable: obstore is not installed.
        TransportError: The store cannot be reached, or refuses. ``StaleSource`` if an object does not exist.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or "@" in parts.netloc)
        if parts.scheme == "file" and parts.netloc in ("", "localhost") and plain:
            url = parts.path
        elif not os.path.isabs(url) and not (parts.scheme == "s3" and parts.netloc and plain):
            raise ConfigurationError(f"{url!r} is not a store: give an absolute path, or s3://bucket/prefix")
        self.url = url
        self._files = LocalFiles(url) if os.path.isabs(url) else None
        missing = missing_library()
        if missing:
            raise TransportUnavailable(missing)
        self._obstore = import_module("obstore")
        if self._files is None:
            with self._errors("opening it"):
                _ = self._store

    def check_writable(self) -> None:
        """Write a small file that says what this is, so that a store that cannot be written is found before there is a version.

        Raises:
            TransportError: It cannot be written. The message says what to check.
        """
        try:
            self.put(_NOTE_PATH, [_NOTE])
        except TransportError as error:
            check = (
                "the bucket, AWS_ENDPOINT_URL, AWS_REGION and the credentials of this process"
                if self._files is None
                else "that it is a folder, that this user may write to it, and that its disk is not full"
            )
            raise TransportError(f"{error}. Check {check}, or leave WEIGHTSYNC_STORE out") from None

    @cached_property
    def _store(self) -> Any:  # noqa: ANN401 - obstore is optional
        from obstore.store import LocalStore, from_url

        if os.path.isabs(self.url):
            return LocalStore(self.url, mkdir=True)
        return from_url(
            self.url,
            # An endpoint without TLS is used only if AWS_ENDPOINT_URL says so.
            client_options={
                "timeout": f"{_REQUEST_SECONDS}s",
                "connect_timeout": f"{_CONNECT_SECONDS}s",
                "allow_http": True,
            },
            retry_config={"max_retries": _RETRIES},
        )

    def put(self, path: str, parts: Iterable[bytes]) -> None:
        """Write a new object. If ``parts`` raises, there is no object."""
        with self._errors(f"writing {path}"):
            self._check_links(path)
            self._obstore.put(self._store, path, parts, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def create(self, path: str, data: bytes) -> bool:
        """Write a small object unless there is one. Returns False if there was another."""
        from obstore.exceptions import AlreadyExistsError

        with self._errors(f"creating {path}"):
            self._check_links(path)
            try:
                self._obstore.put(self._store, path, data, mode="create")
            except AlreadyExistsError:  # perhaps this one: obstore asks again if an answer was lost
                return self.read(path, 0, len(data) + 1) == data
        return True

    def read(self, path: str, first: int, last: int) -> memoryview:
        """Return bytes ``first <= i < last`` of an object, or fewer if it is shorter."""
        if last <= first:
            return memoryview(b"")
        with self._errors(f"reading {path}"):
            if self._files is not None:
                return memoryview(self._files.read(path, first, last))
            return memoryview(self._obstore.get_range(self._store, path, start=first, end=last))

    def size(self, path: str) -> int:
        """Return the bytes of an object."""
        with self._errors(f"reading {path}"):
            if self._files is not None:
                return self._files.size(path)
            return int(self._obstore.head(self._store, path)["size"])

    def list(self, folder: str = "") -> Iterator[Listed]:
        """Iterate over the objects below ``folder``."""
        with self._errors(f"listing {folder}"):
            if self._files is not None:
                for path, known in self._files.list(folder):
                    yield Listed(path, known.st_size, datetime.fromtimestamp(known.st_mtime, UTC))
                return
            for page in self._obstore.list(self._store, prefix=folder or None):
                for item in page:
                    yield Listed(item["path"], item["size"], item["last_modified"])

    def folders(self) -> tuple[str, ...]:
        """Return the folders at the top."""
        if self._files is not None and not os.path.exists(self.url):  # looking at a store makes no folder
            return ()
        with self._errors("listing it"):
            return tuple(self._obstore.list_with_delimiter(self._store)["common_prefixes"])

    def delete(self, path: str) -> None:
        """Remove an object. Nothing happens if there is none."""
        with self._errors(f"deleting {path}"), suppress(FileNotFoundError):
            if self._files is not None:
                self._files.delete(path)
            else:
                self._obstore.delete(self._store, path)

    def _check_links(self, path: str) -> None:
        """Refuse to write through a link. One that is made right now is followed, and then there is a new file elsewhere."""
        if self._files is not None:
            with suppress(FileNotFoundError), self._files.folder(path.rpartition("/")[0]):
                pass

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise StaleSource(f"the store {self.url} has no such object ({what}): it was removed, or never written") from None
        except (BaseError, OSError) as error:
            first = str(error).partition("\n")[0]
            raise TransportError(f"the store {self.url} failed while {what}: {first}") from None
