"""What was published comes back from the store, bit for bit, whatever the shards were, and nothing else does."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.store.stored import RUN, StoringTrainer, change, large_state, small_state

from weightsync.deadline import Deadline
from weightsync.errors import (
    Aborted,
    AuthenticationError,
    ConfigurationError,
    DeadlineExceeded,
    ProtocolError,
    StaleSource,
    TransportError,
    VerificationError,
)
from weightsync.model import Version
from weightsync.model.dtypes import ITEMSIZE, SAFETENSORS_DTYPES
from weightsync.model.stored import CHUNK_BYTES, STORED_BLOCK, StoredObject
from weightsync.protocol.delta_messages import ChangedWords
from weightsync.store import restore
from weightsync.store.catalog import collect_garbage, load, manifest_path, newest, orders
from weightsync.store.objects import Listed, ObjectStore
from weightsync.store.region import StoredRegion
from weightsync.store.restore import check_object, export, tensors_of
from weightsync.store.signing import SigningKey, new_secret, public_key
from weightsync.tensors.change_kernels import CHANGE_BLOCK
from weightsync.tensors.copy_table import CopyTable

SECONDS = 30.0


def restored(trainer: StoringTrainer, number: int, bucket: int = 1 << 20) -> dict[str, bytes]:
    version = load(trainer.store, RUN, (1, number), trainer.key.public)
    buckets = tensors_of(trainer.store, version, Deadline(SECONDS), bucket)
    return {spec.name: data.tobytes() for bucket_of in buckets for spec, data in bucket_of}


def as_bytes(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("make", [small_state, large_state])
def test_every_version_of_a_chain_comes_back(tmp_path: Path, ranks: int, make: Any) -> None:
    state = make()
    trainer = StoringTrainer(tmp_path, state, ranks)
    wanted = {}
    for number, share in enumerate((1.0, 0.01, 0.0, 0.001, 0.2)):
        change(state, share, number)
        trainer.publish(number)
        wanted[number] = as_bytes(state)
    assert trainer.kinds[0] == ("key",) * ranks
    assert trainer.kinds[1] == ("delta",) * ranks
    for number, expected in wanted.items():
        assert restored(trainer, number, 3 << 20) == expected


def test_a_key_frame_is_written_when_the_chain_is_long_enough_or_large_enough(tmp_path: Path) -> None:
    state = large_state()
    trainer = StoringTrainer(tmp_path / "a", state, every=3)
    for number in range(5):
        change(state, 0.001, number)
        trainer.publish(number)
    assert [kinds[0] for kinds in trainer.kinds] == ["key", "delta", "delta", "key", "delta"]
    trainer = StoringTrainer(tmp_path / "b", state, every=100)
    for number in range(8):
        change(state, 0.08, number)  # about a sixth of the bytes
        trainer.publish(number)
    kinds = [kinds[0] for kinds in trainer.kinds]
    assert kinds[:4] == ["key", "delta", "delta", "delta"] and "key" in kinds[4:]
    assert restored(trainer, 7) == as_bytes(state)


def test_more_changes_than_a_delta_can_count_make_a_key_frame(tmp_path: Path) -> None:
    trainer = StoringTrainer(tmp_path, {"weight": torch.zeros(64)})
    objects, key = trainer.ranks[0].objects, StoredObject("a", "key", 40 << 30, 0, b"")
    objects.confirm(Version(RUN, 3, "", ""), (key,))
    lists = dict.fromkeys(("region", "sections", "shards", "counts", "payload", "changed", "words"), 0)
    assert objects._extends(ChangedWords(1, 3, units=1000, **lists)) == (key,)
    for units in (1 << 30, 2 << 30):  # of float32, each would be 8/3 words; the last of 2^32 words has no number
        assert objects._extends(ChangedWords(1, 3, units=units, **lists)) == ()


def test_a_version_that_does_not_exist_is_no_base(tmp_path: Path) -> None:
    state = small_state()
    trainer = StoringTrainer(tmp_path, state)
    trainer.publish(0)
    change(state, 0.01, 1)
    version, _ = trainer.place(1)
    trainer.ranks[0].objects.write(version, trainer.ranks[0].published())  # its manifest is never written
    change(state, 0.01, 2)
    trainer.publish(2)
    assert trainer.kinds == [("key",), ("key",)]
    assert orders(trainer.store, RUN) == [(1, 0), (1, 2)]


def test_key_frames_and_deltas_are_safetensors_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = small_state()
    trainer = StoringTrainer(tmp_path, state, 1)
    trainer.publish(0)
    change(state, 0.01, 1)
    trainer.publish(1)
    stored = load(trainer.store, RUN, (1, 1), trainer.key.public).stored.ranks[0]
    delta = load_file(tmp_path / stored.chain[1].path)
    assert delta["ends"].dtype == torch.uint32 and delta["lists"].dtype == torch.uint16
    change(state, 0.01, 1)  # the same changes again do not undo themselves
    key = load_file(tmp_path / stored.chain[0].path)
    fresh = small_state()
    assert {name: tensor.tolist() for name, tensor in key.items() if "_padding" not in name} == {
        name: tensor.tolist() for name, tensor in fresh.items()
    }


def test_every_dtype_has_a_name_in_safetensors_files() -> None:
    assert set(SAFETENSORS_DTYPES) == set(ITEMSIZE)


def test_a_box_of_a_tensor_has_its_bounds_behind_its_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = small_state()
    trainer = StoringTrainer(tmp_path, state, 2)
    trainer.publish(0)
    stored = load(trainer.store, RUN, (1, 0), trainer.key.public).stored
    key = load_file(tmp_path / stored.ranks[1].chain[0].path)
    assert torch.equal(key["layers.0.weight[0:64, 48:96]"], state["layers.0.weight"][:, 48:])


def test_an_export_is_a_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = large_state()
    trainer = StoringTrainer(tmp_path / "store", state, 3)
    trainer.publish(0)
    change(state, 0.01, 1)
    trainer.publish(1)
    version = load(trainer.store, RUN, (1, 1), trainer.key.public)
    files = export(trainer.store, version, tmp_path / "out", Deadline(SECONDS), 9 << 20)
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    read = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    assert len(files) == 6 and all(torch.equal(read[name], state[name]) for name in state)
    with pytest.raises(ConfigurationError, match="has a checkpoint already"):
        export(trainer.store, version, tmp_path / "out", Deadline(SECONDS))


@pytest.mark.parametrize("after", [1, 2])
def test_an_export_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    trainer = StoringTrainer(tmp_path, large_state(), 1)
    trainer.publish(1)
    version = load(trainer.store, RUN, (1, 1), trainer.key.public)
    write, written = restore._write, list[Path]()

    def interrupted(path: Path, *arguments: Any) -> None:
        written.append(path)
        write(path, *arguments)
        if len(written) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(restore, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(trainer.store, version, tmp_path / "out", Deadline(SECONDS), 9 << 20)
    assert len(written) == after
    assert list((tmp_path / "out").iterdir()) == []
    assert len(export(trainer.store, version, tmp_path / "out", Deadline(SECONDS), 9 << 20)) > after


def test_a_store_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(TransportError, match=r"failed while .*Check that it is a folder, .* or leave WEIGHTSYNC_STORE out"):
            ObjectStore(str(tmp_path / path)).check_writable()
    store = ObjectStore(str(tmp_path / "new"))
    for _ in range(2):
        store.check_writable()
    assert b"weightsync store ls" in bytes(store.read("weightsync.txt", 0, 1 << 20))


def test_only_the_chunks_of_a_box_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = large_state()
    trainer = StoringTrainer(tmp_path, state)
    trainer.publish(0)
    change(state, 0.01, 1)
    trainer.publish(1)
    chain = load(trainer.store, RUN, (1, 1), trainer.key.public).stored.ranks[0].chain
    reads: list[tuple[str, int]] = []
    read = ObjectStore.read

    def counted(self: ObjectStore, path: str, first: int, last: int) -> memoryview:
        reads.append((path, first))
        return read(self, path, first, last)

    monkeypatch.setattr(ObjectStore, "read", counted)
    nbytes = trainer.ranks[0].layout.regions[0]
    target = np.zeros(4096, np.uint8)
    one = np.ones(1, np.int64)
    for source in (0, 5 * CHUNK_BYTES, nbytes - 4096):
        region = StoredRegion(trainer.store, chain, nbytes)
        tiles = CopyTable(np.zeros(1, np.int32), source * one, 0 * one, target.ctypes.data * one, 0 * one, one, 4096 * one)
        region.prepare([tiles])
        reads.clear()
        region.begin()
        region.read(0, Deadline(SECONDS))
        region.close()
        assert len([path for path, _ in reads if path == chain[0].path]) == 1 and len(reads) <= 3
        assert bytes(target) == bytes(trainer.ranks[0].memory[source : source + 4096])


# What is wrong in a store.


def test_a_changed_object_is_noticed_in_every_byte(tmp_path: Path) -> None:
    state = small_state()
    trainer = StoringTrainer(tmp_path, state)
    trainer.publish(0)
    change(state, 0.01, 1)
    trainer.publish(1)
    version = load(trainer.store, RUN, (1, 1), trainer.key.public)
    for item in version.objects.values():
        file = tmp_path / item.path
        whole = bytearray(file.read_bytes())
        for place in (0, item.data, item.nbytes - 1):
            whole[place] ^= 1
            file.write_bytes(whole)
            with pytest.raises(VerificationError, match="changed"):
                check_object(trainer.store, item)
            with pytest.raises(VerificationError, match="changed"):
                restored(trainer, 1)
            whole[place] ^= 1
        file.write_bytes(whole[:-1])
        with pytest.raises(VerificationError, match="changed"):
            restored(trainer, 1)
        file.write_bytes(whole + b"x")
        with pytest.raises(VerificationError, match="bytes"):
            check_object(trainer.store, item)
        file.write_bytes(whole)
    assert restored(trainer, 1) == as_bytes(state)


def test_swapped_objects_are_noticed(tmp_path: Path) -> None:
    state = small_state()
    trainer = StoringTrainer(tmp_path, state, 2)
    trainer.publish(0)
    first, second = load(trainer.store, RUN, (1, 0), trainer.key.public).objects.values()
    (tmp_path / first.path).rename(tmp_path / "held")
    (tmp_path / second.path).rename(tmp_path / first.path)
    (tmp_path / "held").rename(tmp_path / second.path)
    with pytest.raises(VerificationError):
        restored(trainer, 0)


def test_a_removed_object_is_stale(tmp_path: Path) -> None:
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    version = load(trainer.store, RUN, (1, 0), trainer.key.public)
    (tmp_path / next(iter(version.objects))).unlink()
    with pytest.raises(StaleSource, match="removed"):
        restored(trainer, 0)


def test_manifests_are_believed_only_with_the_runs_signature_and_in_their_place(tmp_path: Path) -> None:
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(3)
    path = tmp_path / manifest_path(RUN, (1, 3))
    honest = path.read_bytes()
    other = SigningKey(new_secret())
    with pytest.raises(AuthenticationError, match="not signed"):
        load(trainer.store, RUN, (1, 3), other.public)
    for place in range(0, len(honest), 7):
        changed = bytearray(honest)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(AuthenticationError):
            load(trainer.store, RUN, (1, 3), trainer.key.public)
    for length in (0, 7, 8, 71, 72, len(honest) - 1):
        path.write_bytes(honest[:length])
        with pytest.raises(AuthenticationError):
            load(trainer.store, RUN, (1, 3), trainer.key.public)
    path.write_bytes(honest)
    moved = tmp_path / manifest_path(RUN, (1, 4))
    moved.write_bytes(honest)
    with pytest.raises(AuthenticationError, match="is that of version"):
        load(trainer.store, RUN, (1, 4), trainer.key.public)
    found = newest(trainer.store, RUN, trainer.key.public)
    assert found is not None and found.version.number == 3


def test_a_signed_manifest_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    from msgspec import structs

    trainer = StoringTrainer(tmp_path, small_state())
    version = trainer.publish(0)
    stored = load(trainer.store, RUN, (1, 0), trainer.key.public).stored
    rank, item = stored.ranks[0], stored.ranks[0].chain[0]

    def with_item(**changed: object) -> object:
        chain = (structs.replace(item, **changed),)
        return structs.replace(stored, ranks=(structs.replace(rank, chain=chain),))

    wrong = [
        structs.replace(stored, digests=stored.digests[:-8]),
        structs.replace(stored, digests=bytes(len(stored.digests))),
        structs.replace(stored, tensors=stored.tensors[:-1]),
        structs.replace(stored, ranks=(structs.replace(rank, chain=(item, item)),)),
        with_item(kind="delta"),
        with_item(hashes=item.hashes[:-1]),
        with_item(data=item.data - 1),
        with_item(data=item.nbytes + STORED_BLOCK),
        with_item(nbytes=item.nbytes + 8),
        with_item(path="../../etc/passwd"),
        with_item(path="/etc/passwd"),
        with_item(path="a/../b"),
        with_item(nbytes=1 << 62),
    ]
    for manifest in wrong:
        (tmp_path / manifest_path(RUN, version.order)).write_bytes(trainer.key.signed(manifest))  # type: ignore[arg-type]
        with pytest.raises(ProtocolError):
            load(trainer.store, RUN, (1, 0), trainer.key.public)


def test_deltas_that_are_none_are_refused(tmp_path: Path) -> None:
    """Only a trainer of the run could have them signed; even then nothing is written out of place."""
    import hashlib

    from msgspec import structs

    state = small_state()
    trainer = StoringTrainer(tmp_path, state)
    trainer.publish(0)
    change(state, 0.01, 1)
    trainer.publish(1)
    key, item = load(trainer.store, RUN, (1, 1), trainer.key.public).stored.ranks[0].chain
    nbytes = trainer.ranks[0].layout.regions[0]
    honest = (tmp_path / item.path).read_bytes()
    random = np.random.default_rng(7)
    refused = 0
    for _ in range(200):
        data = bytearray(honest)
        for place in random.integers(item.data, item.nbytes, 3).tolist():
            data[place] = int(random.integers(256))
        (tmp_path / item.path).write_bytes(data)
        forged = structs.replace(item, hashes=hashlib.sha256(data).digest())
        target = np.zeros(nbytes, np.uint8)
        one = np.ones(1, np.int64)
        tiles = CopyTable(np.zeros(1, np.int32), 0 * one, 0 * one, target.ctypes.data * one, 0 * one, one, nbytes * one)
        try:
            region = StoredRegion(trainer.store, (key, forged), nbytes)
            region.prepare([tiles])
            region.read(0, Deadline(SECONDS))
        except ProtocolError:
            refused += 1
    assert refused > 20


def test_a_slow_store_ends_at_the_deadline_and_an_abort_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    chain = load(trainer.store, RUN, (1, 0), trainer.key.public).stored.ranks[0].chain
    nbytes = trainer.ranks[0].layout.regions[0]
    hold = threading.Event()
    read = ObjectStore.read

    def held(self: ObjectStore, path: str, first: int, last: int) -> memoryview:
        hold.wait(SECONDS)
        return read(self, path, first, last)

    monkeypatch.setattr(ObjectStore, "read", held)
    target = np.zeros(nbytes, np.uint8)
    one = np.ones(1, np.int64)
    region = StoredRegion(trainer.store, chain, nbytes)
    region.prepare([CopyTable(np.zeros(1, np.int32), 0 * one, 0 * one, target.ctypes.data * one, 0 * one, one, nbytes * one)])
    with pytest.raises(DeadlineExceeded, match="store"):
        region.read(0, Deadline(0.05))
    timer = threading.Timer(0.05, region.abort)
    timer.start()
    with pytest.raises(Aborted):
        region.read(0, Deadline(SECONDS))
    timer.join(SECONDS)
    hold.set()
    region.begin()
    region.read(0, Deadline(SECONDS))
    assert bytes(target) == bytes(trainer.ranks[0].memory[:nbytes])
    region.close()
    region.close()


# Garbage.


def test_garbage_collection_keeps_what_kept_versions_need(tmp_path: Path) -> None:
    state = small_state()
    trainer = StoringTrainer(tmp_path, state, 2, every=3)
    for number in range(6):
        change(state, 0.001, number)
        trainer.publish(number)
    wanted = as_bytes(state)
    before = sum(1 for _ in trainer.store.list())
    planned = collect_garbage(trainer.store, RUN, trainer.key.public, 1, grace=0, dry_run=True)
    assert sum(1 for _ in trainer.store.list()) == before and len(planned.versions) == 5
    young = collect_garbage(trainer.store, RUN, trainer.key.public, 5)
    assert young.versions == ((1, 0),) and not young.objects  # they may belong to a version that is being written
    done = collect_garbage(trainer.store, RUN, trainer.key.public, 1, grace=0)
    assert done.objects == 6 and orders(trainer.store, RUN) == [(1, 5)]
    assert restored(trainer, 5) == wanted
    change(state, 0.001, 9)
    trainer.publish(6)
    assert restored(trainer, 6) == as_bytes(state)
    with pytest.raises(ConfigurationError):
        collect_garbage(trainer.store, RUN, trainer.key.public, 0)


def test_garbage_collection_removes_nothing_if_it_cannot_tell_what_is_needed(tmp_path: Path) -> None:
    trainer = StoringTrainer(tmp_path, small_state())
    for number in range(3):
        trainer.publish(number)
    before = sorted(item.path for item in trainer.store.list())
    path = tmp_path / manifest_path(RUN, (1, 2))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AuthenticationError):
        collect_garbage(trainer.store, RUN, trainer.key.public, 1, grace=0)
    assert sorted(item.path for item in trainer.store.list()) == before


def old_file(path: Path) -> Path:
    path.write_bytes(b"precious")
    os.utime(path, (1, 1))
    return path


def test_garbage_collection_leaves_the_store_by_no_link(tmp_path: Path) -> None:
    trainer = StoringTrainer(tmp_path / "store", small_state())
    trainer.publish(0)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    outside = old_file(elsewhere / "mine.safetensors")
    objects = tmp_path / "store" / RUN / "objects"
    (objects / "folder").symlink_to(elsewhere)
    (objects / "file.safetensors").symlink_to(outside)
    assert not collect_garbage(trainer.store, RUN, trainer.key.public, 1).objects
    assert outside.exists()
    # The folder becomes a link after it was listed.
    (objects / "real").mkdir()
    old_file(objects / "real" / outside.name)
    (tmp_path / "store" / "aside").mkdir()
    every = ObjectStore.list

    def swapping(self: ObjectStore, folder: str = "") -> list[Listed]:
        found = list(every(self, folder))
        if not folder.endswith("versions"):
            (objects / "real").rename(tmp_path / "store" / "aside" / "real")
            (objects / "real").symlink_to(elsewhere)
        return found

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TransportError, match="failed while deleting"):
        patch.setattr(ObjectStore, "list", swapping)
        collect_garbage(trainer.store, RUN, trainer.key.public, 1)
    assert outside.exists()


def test_nothing_is_written_or_read_through_a_link(tmp_path: Path) -> None:
    state = small_state()
    trainer = StoringTrainer(tmp_path / "store", state)
    trainer.publish(0)
    assert restored(trainer, 0) == as_bytes(state)
    objects = tmp_path / "store" / RUN / "objects"
    objects.rename(tmp_path / "elsewhere")
    objects.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransportError, match="failed while reading"):
        restored(trainer, 0)
    with pytest.raises(TransportError, match="failed while writing"):
        trainer.publish(1)
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "store")  # the store itself may be reached by one
    assert ObjectStore(str(link)).size(manifest_path(RUN, (1, 0))) > 0


def test_a_pipe_in_a_store_keeps_nobody_waiting(tmp_path: Path) -> None:
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    manifest = manifest_path(RUN, (1, 0))
    noticed: list[str] = []

    def look() -> None:
        for path in (next(iter(load(trainer.store, RUN, (1, 0), trainer.key.public).objects)), manifest):
            (tmp_path / path).unlink()
            os.mkfifo(tmp_path / path)
            with pytest.raises(TransportError, match="no regular file"):
                restored(trainer, 0)
            noticed.append(path)
        if newest(trainer.store, RUN, trainer.key.public) is None:
            noticed.append("newest")

    looking = threading.Thread(target=look, daemon=True)  # what opens a pipe cannot be interrupted
    looking.start()
    looking.join(10)
    assert len(noticed) == 3


def test_a_version_that_cannot_be_read_just_now_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one was taken for the newest, and numbers went on above that one."""
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    trainer.publish(1)

    def read(store: ObjectStore, path: str, first: int, last: int) -> memoryview:
        if path == manifest_path(RUN, (1, 1)):
            raise TransportError("the store is busy")
        return real(store, path, first, last)

    real = ObjectStore.read
    monkeypatch.setattr(ObjectStore, "read", read)
    with pytest.raises(TransportError, match="busy"):
        newest(trainer.store, RUN, trainer.key.public)


# Names.


def test_nobody_makes_a_store_who_only_reads(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path / "none"))
    assert not orders(store, RUN)
    with pytest.raises(StaleSource):
        load(store, RUN, (1, 0), bytes(32))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "url", ["relative/path", "s3://", "http://host/path", "s3://key@bucket/a", "s3://bucket/a?x=1", "", "file://host/a"]
)
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not a store"):
        ObjectStore(url)


def test_keys_are_text_that_shows_nowhere() -> None:
    secret = new_secret()
    key = SigningKey(secret)
    assert public_key(key.public_text) == key.public
    assert secret.reveal() not in repr(key)
    for text in ("", "a", "A" * 42, "A" * 44, "ä" * 43):
        with pytest.raises(ConfigurationError, match="43 characters"):
            public_key(text)


def test_blocks_are_those_of_the_lists_of_changes() -> None:
    assert STORED_BLOCK % CHANGE_BLOCK == 0 and CHUNK_BYTES % STORED_BLOCK == 0


def test_a_store_that_cannot_be_written_is_a_transport_error(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path / "a"))
    store.put("other", [b"x"])
    (tmp_path / "a" / "file").write_text("in the way")
    with pytest.raises(TransportError, match="failed while writing"):
        store.put("file/object", [b"x"])
