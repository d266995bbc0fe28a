"""Checkpoint directories that somebody hostile made: links, pipes, names that lead out, headers that cost too much to refuse."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from weightsync.adapters.checkpoints import INDEX, Checkpoint
from weightsync.errors import ConfigurationError

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
    with pytest.raises(ConfigurationError, match=words), Checkpoint(given):
        pass


def test_a_link_out_of_the_directory_is_refused_unless_it_is_asked_for(given: Path, private: Path) -> None:
    (given / "model.safetensors").symlink_to(private)
    refused(given, "leads out of the checkpoint.*follow_links=True, --follow-links")
    with Checkpoint(given, follow_links=True) as checkpoint:
        assert len(checkpoint.manifest) == 1
    with Checkpoint(given / "model.safetensors") as named:  # the caller named the very link
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
    with Checkpoint(given) as checkpoint:
        assert len(checkpoint.manifest) == 1


def test_a_directory_that_is_itself_a_link_is_no_matter(given: Path, tmp_path: Path) -> None:
    (given / "model.safetensors").write_bytes(file_of(["w"]))
    (tmp_path / "latest").symlink_to(given)
    with Checkpoint(tmp_path / "latest") as checkpoint:
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
    refused(given, "not a file of this directory")


def test_many_names_twice_are_refused_in_time(given: Path) -> None:
    names = [f'"t{i}":0' for i in range(200_000)]
    text = ("{" + ",".join([*names, names[-1]]) + "}").encode()
    (given / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    started = time.monotonic()
    refused(given, "'t199999' occurs twice")
    assert time.monotonic() - started < 20  # looking for each name among all of them would take minutes


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "a\x1b[31mb", "x" * 2000, "9" * 900 + "\ud800", ""])
def test_names_that_no_tensor_has(given: Path, name: str) -> None:
    (given / "model.safetensors").write_bytes(file_of([name]))
    refused(given, "name|not a tensor")
