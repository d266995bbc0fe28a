"""Safetensors checkpoints, read bucket by bucket: headers and paths are untrusted input, validated first.

The format is that of https://huggingface.co/docs/safetensors: eight bytes of length, a JSON header, then the tensors without gaps.
A sharded checkpoint has an index, ``model.safetensors.index.json``, that says which file holds which tensor.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from weightsync.arrays import Bytes
from weightsync.closing import Closeable
from weightsync.errors import ConfigurationError, few
from weightsync.model import Manifest, TensorSpec
from weightsync.model.dtypes import SAFETENSORS_DTYPES
from weightsync.old_names import moved_names
from weightsync.protocol.messages import UNREADABLE

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_MAX_HEADER = 100_000_000
"""Bytes of a header: the format's own limit."""
_MAX_INDEX = 64 << 20
_MAX_TENSORS = 1 << 19
"""Each takes about a kilobyte and 20 us when it is read. A stream has no more parts."""
_MAX_FIELDS = 4096
"""Of one entry of a header. A tensor has three; the rest is for ``__metadata__``."""
_MAX_FILES = 4096
_MAX_NAME = 1024
_READ = 16 << 20
_FILE = r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,240}\.safetensors"
_SPARSE = 8
"""A file may be so many times larger than what is stored of it: some file systems compress."""
_UNCOUNTED = 1 << 20
"""Bytes of a file that a file system may keep where they are not counted."""


class _Name(str):
    """A tensor's name, as it is decoded."""

    __slots__ = ()


class _Field(str):
    """A field's name in an entry, as it is decoded."""

    __slots__ = ()


class _Index(msgspec.Struct):
    weight_map: dict[_Name, Annotated[str, msgspec.Meta(pattern=rf"^{_FILE}\Z")]]


_Entry = dict[_Field, str | list[int]]
_Header = dict[_Name, _Entry]


class _Location(NamedTuple):
    descriptor: int
    path: Path
    offset: int


class CheckpointFiles(Closeable):
    """The tensors of a checkpoint ``directory`` (or one ``.safetensors`` file), open for reading. Close it, or use a ``with``.

    Reads headers only; :meth:`read` reads a tensor. A name in the index never leads out of the directory. Links are followed within
    it, and to the blobs of Hugging Face's cache if it is a snapshot there; with ``follow_links`` to anywhere, which lets a process
    that made the directory have any safetensors file sent that you may read. A file of which the file system stores next to
    nothing is refused, since it costs its maker nothing and its reader its size; with ``allow_sparse`` it is read. Raises
    :class:`~weightsync.errors.ConfigurationError` for a directory without a checkpoint, and for every header or index that is not
    what the format says.
    """

    def __init__(self, directory: Path, *, follow_links: bool = False, allow_sparse: bool = False) -> None:
        self._places: dict[str, _Location] = {}
        self._allow_sparse = allow_sparse
        # A file that the caller names is what the caller wants, wherever it leads.
        self._folders = None if follow_links or directory.is_file() else _allowed(directory)
        specs: list[TensorSpec] = []
        with ExitStack() as opened:
            mapped = None if directory.is_file() else _find(directory, self._folders)
            if mapped is not None:
                files = [directory / name for name in sorted(set(mapped.values()))]
            else:
                files = [directory if directory.is_file() else _only(directory)]
            for path in files:
                specs += self._open(path, mapped, opened)
            if mapped is not None and len(mapped) != len(specs):
                missing = sorted(set(mapped) - {spec.name for spec in specs})
                raise ConfigurationError(f"{directory / INDEX} names tensors that its files lack: {few(missing)}")
            if not specs:
                raise ConfigurationError(f"{directory} holds no tensors")
            self.manifest = Manifest(specs)
            self._opened = opened.pop_all()

    def _open(self, path: Path, mapped: dict[str, str] | None, opened: ExitStack) -> Iterator[TensorSpec]:
        try:
            descriptor, size = _regular(path, self._folders)
        except FileNotFoundError as error:
            raise ConfigurationError(f"cannot open {path}: {error.strerror}") from error
        opened.callback(os.close, descriptor)
        stored = os.fstat(descriptor).st_blocks * 512
        if size > stored * _SPARSE + _UNCOUNTED and not self._allow_sparse:
            raise ConfigurationError(
                f"{path} has {size:,} bytes, of which {stored:,} are stored; if its file system does not say what it stores, allow "
                "it (allow_sparse=True, --allow-sparse)"
            )
        for spec, offset in _read_header(path, descriptor, size):
            if spec.name in self._places:
                raise ConfigurationError(f"{path}: tensor {spec.name!r} is in {self._places[spec.name].path.name} already")
            if mapped is not None and mapped.get(spec.name) != path.name:
                raise ConfigurationError(f"{path}: the index does not say that tensor {spec.name!r} is here")
            self._places[spec.name] = _Location(descriptor, path, offset)
            yield spec

    def read(self, specs: Sequence[TensorSpec], memory: Bytes) -> None:
        """Read whole tensors into ``memory``, one after the other without padding.

        Raises :class:`~weightsync.errors.ConfigurationError` for a file that has become shorter, or memory that is too small.
        """
        if sum(spec.nbytes for spec in specs) > len(memory):
            raise ConfigurationError(f"{len(memory):,} bytes are not enough for {len(specs)} tensors")
        done = 0
        for spec in specs:
            place, end = self._places[spec.name], done + spec.nbytes
            at = place.offset
            while done < end:
                count = os.preadv(place.descriptor, [memory[done : min(end, done + _READ)].data], at)
                if count == 0:
                    raise ConfigurationError(f"{place.path} ended in the middle of {spec.name}: another process made it shorter")
                done, at = done + count, at + count

    def close(self) -> None:
        """Close all files. Safe twice."""
        self._opened.close()


def _allowed(directory: Path) -> tuple[Path, ...]:
    """Where a checkpoint's files may really lie: in it, or among the blobs that a snapshot of Hugging Face's cache links to."""
    root = Path(os.path.realpath(directory))
    return (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)


def _regular(path: Path, folders: tuple[Path, ...] | None) -> tuple[int, int]:
    """An open descriptor of a regular file that really lies in one of ``folders``, and its size. Never waits for a pipe.

    Raises :class:`FileNotFoundError`, and :class:`~weightsync.errors.ConfigurationError` for anything else that is wrong.
    """
    try:
        with ExitStack() as opened:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"{path} is not a regular file")
            if folders is not None:
                real = Path(os.path.realpath(path))
                # The file that is open must be the one at that place: a link may be exchanged between two looks.
                if real.parent not in folders or not os.path.samestat(os.stat(real), status):
                    raise ConfigurationError(
                        f"{path} is a link that leads out of the checkpoint, to {real}; name that file itself, or say that links "
                        "are to be followed (follow_links=True, --follow-links)"
                    )
            opened.pop_all()
            return descriptor, status.st_size
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(f"cannot open {path}: {error.strerror}") from error


def _only(directory: Path) -> Path:
    """The one file of a checkpoint without an index."""
    if (directory / SINGLE).exists():
        return directory / SINGLE
    try:
        files = sorted(path for path in directory.iterdir() if path.name.endswith(".safetensors"))
    except OSError as error:
        raise ConfigurationError(f"{directory} is not a checkpoint: {error.strerror}") from error
    if len(files) != 1:
        raise ConfigurationError(f"{directory} has neither {INDEX} nor {SINGLE}, and {len(files)} other .safetensors files")
    return files[0]


def _find(directory: Path, folders: tuple[Path, ...] | None) -> dict[str, str] | None:
    """Which file holds which tensor; ``None`` without an index."""
    path = directory / INDEX
    try:
        descriptor, size = _regular(path, folders)
    except FileNotFoundError:
        return None
    try:
        if size > _MAX_INDEX:
            raise ConfigurationError(f"{path} has more than {_MAX_INDEX:,} bytes")
        data = _exactly(path, descriptor, size, 0)
    finally:
        os.close(descriptor)
    mapped: dict[str, str] = {str(name): file for name, file in _decoded(path, data, _Index).weight_map.items()}
    if not mapped:
        raise ConfigurationError(f"{path} has no weight_map")
    if len(set(mapped.values())) > _MAX_FILES:
        raise ConfigurationError(f"{path} names more than {_MAX_FILES} files")
    return mapped


def _decoded(path: Path, data: bytes, kind: Any) -> Any:  # noqa: ANN401 - the type of its argument
    """JSON of this very kind, decoded without building anything else; no name may occur twice in an object.

    The decoder stops at the first thing that does not belong there, and at the first name too many, so what is built is bounded.
    """
    if data.count(b",") > 32 * _MAX_TENSORS:  # a list is built before its length can be looked at
        raise ConfigurationError(f"{path} has more JSON than {_MAX_TENSORS:,} tensors need")
    names: set[str] = set()
    fields: set[str] = set()

    def once(key: type, text: str) -> object:
        seen, most = (names, _MAX_TENSORS) if key is _Name else (fields, _MAX_FIELDS)
        if key is _Name:
            fields.clear()  # those of the entry before
        if text in seen:
            raise ValueError(f"{text[:200]!r} occurs twice")
        if len(seen) >= most:
            raise ValueError(f"more than {most:,} names")
        seen.add(text)
        return key(text)

    try:
        value = msgspec.json.decode(data, type=kind, dec_hook=once)
    except UNREADABLE as error:
        what = "is not an index (JSON) of files of this directory" if kind is _Index else "does not begin with a header (JSON)"
        raise ConfigurationError(f"{path} {what}: {str(error)[:500]}") from None
    if kind is _Index and len(value.weight_map) != len(names):
        raise ConfigurationError(f"{path}: 'weight_map' occurs twice")
    return value


def _read_header(path: Path, descriptor: int, size: int) -> list[tuple[TensorSpec, int]]:
    """Each tensor and where its bytes begin, checked against the size of the file."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little") if size >= 8 else 0
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise ConfigurationError(f"{path} is not a safetensors file: {size:,} bytes, with a header of {length:,}")
    header: _Header = _decoded(path, _exactly(path, descriptor, length, 8), _Header)
    header.pop(_Name("__metadata__"), None)
    base, end = 8 + length, 0
    entries = []
    for name, entry in header.items():
        spec, first, last = _entry(path, str(name), entry)
        if last > size - base:
            raise ConfigurationError(f"{path}: tensor {name!r} ends {last - (size - base):,} bytes after the file")
        entries.append((spec, first, last))
    for spec, first, last in sorted(entries, key=lambda entry: entry[1:]):
        if first != end:
            what = "overlaps another" if first < end else "comes after a gap"
            raise ConfigurationError(f"{path}: tensor {spec.name!r} {what} (bytes {first:,} to {last:,}, after {end:,})")
        end = last
    if end != size - base:
        raise ConfigurationError(f"{path}: {size - base - end:,} bytes at the end belong to no tensor")
    return [(spec, base + first) for spec, first, _ in entries]


def _exactly(path: Path, descriptor: int, length: int, offset: int) -> bytes:
    data = b""
    while len(data) < length:
        part = os.pread(descriptor, length - len(data), offset + len(data))
        if not part:
            raise ConfigurationError(f"{path} ended in the middle of its header")
        data += part
    return data


def _whole(*values: int) -> bool:
    return all(0 <= value < 1 << 62 for value in values)


def _entry(path: Path, name: str, entry: _Entry) -> tuple[TensorSpec, int, int]:
    """One tensor of a header, and its first and last byte."""
    if set(entry) != {"dtype", "shape", "data_offsets"} or not 0 < len(name) <= _MAX_NAME:
        raise ConfigurationError(f"{path}: {name[:200]!r} is not a tensor")
    dtype, shape, offsets = (entry[_Field(field)] for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ConfigurationError(f"{path}: tensor {name!r} has dtype {str(dtype)[:50]!r}; known: {', '.join(_DTYPES)}")
    if isinstance(shape, str) or isinstance(offsets, str) or len(shape) > 16 or len(offsets) != 2 or not _whole(*shape, *offsets):
        raise ConfigurationError(
            f"{path}: tensor {name!r} has an impossible shape or place: {str(shape)[:80]}, {str(offsets)[:80]}"
        )
    spec = TensorSpec(name, tuple(shape), _DTYPES[dtype])
    first, last = offsets
    if last - first != spec.nbytes:
        raise ConfigurationError(f"{path}: tensor {name!r} of {spec.nbytes:,} bytes has {last - first:,}")
    return spec, first, last


moved_names(__name__, "weightsync_disaggregated.buckets", "buckets_of")
