"""Files below a folder that others can write, too. Nothing leaves it by a link, and only regular files are opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
