"""Hostile checkpoint directories: links, pipes, names that lead out, headers that cost too much to refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightsync.errors import ConfigurationError
from weightsync.external import checkpoint_files
from weightsync.external.checkpoint_files import INDEX, CheckpointFiles

pytestmark = pytest.mark.usefixtures("no_leaks")

SECRET = 0x5EC2E7


def file_of(names: list[str]) -> bytes:
    entries = {name: {"dtype": "I32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + SECRET.to_bytes(4, "little") * len(names)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Somebody's weights elsewhere on this machine."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "private.safetensors").write_bytes(file_of(["w"]))
    return elsewhere / "private.safetensors"


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """The directory that came from outside."""
    (tmp_path / "given").mkdir()
    return tmp_path / "given"


def index(given: Path, mapped: object) -> None:
    (given / INDEX).write_text(json.dumps({"weight_map": mapped}))


def refused(given: Path, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words), CheckpointFiles(given):
        pass


def test_a_link_out_of_the_directory_is_refused_unless_it_is_asked_for(given: Path, private: Path) -> None:
    (given / "model.safetensors").symlink_to(private)
    refused(given, "leads out of the checkpoint.*follow_links=True, --follow-links")
    with CheckpointFiles(given, follow_links=True) as checkpoint:
        assert len(checkpoint.manifest) == 1
    with CheckpointFiles(given / "model.safetensors") as named:  # the caller named the very link
        assert len(named.manifest) == 1


def test_a_link_of_the_index_or_through_it_is_refused(given: Path, private: Path, tmp_path: Path) -> None:
    (given / "a.safetensors").symlink_to("../elsewhere/private.safetensors")
    index(given, {"w": "a.safetensors"})
    refused(given, "leads out")
    (tmp_path / "stolen.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    (given / INDEX).unlink()
    (given / INDEX).symlink_to(tmp_path / "stolen.json")
    refused(given, "leads out")


def test_links_within_the_directory_are_followed(given: Path) -> None:
    (given / "v1.safetensors").write_bytes(file_of(["w"]))
    (given / "model.safetensors").symlink_to("v1.safetensors")
    with CheckpointFiles(given) as checkpoint:
        assert len(checkpoint.manifest) == 1


def test_a_directory_that_is_itself_a_link_is_no_matter(given: Path, tmp_path: Path) -> None:
    (given / "model.safetensors").write_bytes(file_of(["w"]))
    (tmp_path / "latest").symlink_to(given)
    with CheckpointFiles(tmp_path / "latest") as checkpoint:
        assert len(checkpoint.manifest) == 1


def test_something_that_only_looks_like_a_cache_gives_nothing_else(given: Path, private: Path) -> None:
    snapshot = given / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (given / "blobs").symlink_to(private.parent)  # the blobs themselves are a link to elsewhere
    (snapshot / "model.safetensors").symlink_to("../../blobs/private.safetensors")
    refused(snapshot, "leads out")


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_pipe_or_a_folder_is_refused_and_not_waited_for(given: Path, name: str) -> None:
    os.mkfifo(given / name)
    started = time.monotonic()
    refused(given, "not a regular file")
    assert time.monotonic() - started < 5
    (given / name).unlink()
    (given / name).mkdir()
    refused(given, "not a regular file|Is a directory")


@pytest.mark.parametrize(
    "name",
    [
        "../elsewhere/private.safetensors",
        "a/../../elsewhere/private.safetensors",
        "/elsewhere/private.safetensors",
        "..",
        ".",
        "",
        "sub/a.safetensors",
        "a.safetensors\0.txt",
        "a.safetensors\n",
        "\u2025/private.safetensors",
        "a.bin",
        ["a.safetensors"],
        7,
        None,
    ],
)
def test_a_name_in_the_index_never_leads_out(given: Path, private: Path, name: object) -> None:
    index(given, {"w": name})
    refused(given, "files of this directory")


def test_many_names_twice_are_refused_in_time(given: Path) -> None:
    names = [f'"t{i}":{{}}' for i in range(200_000)]
    text = ("{" + ",".join([*names, names[-1]]) + "}").encode()
    (given / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    started = time.monotonic()
    refused(given, "'t199999' occurs twice")
    assert time.monotonic() - started < 20  # looking for each name among all of them would take minutes


def written(given: Path, name: str, begin: bytes, part: bytes, end: bytes, nbytes: int) -> None:
    """A header, or an index, of so many bytes of JSON."""
    text = begin + part * ((nbytes - len(begin) - len(end)) // len(part)) + end
    head = b"" if name == INDEX else len(text).to_bytes(8, "little")
    (given / name).write_bytes(head + text)


BOMBS = {
    "objects in a list": (b'{"a":[', b"{},", b"{}]}"),
    "objects for tensors": (b'{"a":', b'{"b":', b""),
    "numbers": (b'{"a":{"shape":[', b"0,", b"0]}}"),
    "objects of no use": (b'{"weight_map":{},"more":[', b"{},", b"{}]}"),
    "fields": (b'{"a":{"b":"c"', b',"d":"e"', b"}}"),
}


@pytest.mark.parametrize("case", BOMBS)
@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_json_that_is_larger_in_memory_than_on_disk_is_not_built(given: Path, name: str, case: str) -> None:
    begin, part, end = BOMBS[case]
    written(given, name, begin, part, end, 20_000_000)
    refused(given, "JSON|weight_map|not a tensor")  # and what was imported for it is there now
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(given)], capture_output=True, text=True, timeout=55, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 130 << 20, f"{int(done.stdout):,} bytes for 20 MB"


_MEASURE = """
import sys
from pathlib import Path
from weightsync.external.checkpoint_files import CheckpointFiles
from weightsync.errors import ConfigurationError

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10

before = peak()
try:
    CheckpointFiles(Path(sys.argv[1]))
except ConfigurationError:
    print(peak() - before)
"""


def test_an_index_has_at_most_64_mib(given: Path) -> None:
    with (given / INDEX).open("wb") as file:
        file.truncate((64 << 20) + 1)
    refused(given, "more than 67,108,864 bytes")


def test_more_tensors_than_any_model_has_are_refused_early(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million empty tensors, in a header of 57 MB, took a gigabyte and 35 s."""
    assert checkpoint_files._MAX_TENSORS == 524_288
    monkeypatch.setattr(checkpoint_files, "_MAX_TENSORS", 4)
    (given / "model.safetensors").write_bytes(file_of(["a", "b", "c", "d", "e"]))
    refused(given, "more than 4 names")


def test_a_file_that_stores_nothing_of_its_size_is_refused_unless_it_is_asked_for(given: Path) -> None:
    size = 1 << 43
    entry = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(entry).encode()
    with (given / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    refused(given, "are stored.*allow_sparse=True, --allow-sparse")
    with CheckpointFiles(given, allow_sparse=True) as checkpoint:
        assert checkpoint.manifest.nbytes == size


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "a\x1b[31mb", "x" * 2000, "9" * 900 + "\ud800", ""])
def test_names_that_no_tensor_has(given: Path, name: str) -> None:
    (given / "model.safetensors").write_bytes(file_of([name]))
    refused(given, "name|not a tensor")
