"""Every parser survives what a stranger may send: seeds, mutations of them, earlier findings, and a short guided search.

`make fuzz SECONDS=...` searches longer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz.coverage_guided import ROOT
from tests.fuzz.targets import TARGETS

from weightsync.errors import WeightSyncError

SECONDS = int(os.environ.get("WEIGHTSYNC_FUZZ_SECONDS", "4"))
STRANGERS = {
    "reader-greeting",
    "owner-greeting",
    "descriptors",
    "wanted",
    "frames",
}  # some of their seeds end in an error by design

FOUND: dict[str, tuple[str, bytes]] = {
    # By Atheris. Each was an error of Python's own, which ends a thread or an HTTP request with 500 instead of a refusal.
    "a shared-memory owner's description that is not UTF-8": ("descriptors", b"\x82\xa6nbytes@\xadlayobytes@\xadst\xa1x"),
    "a command of an updated server that is not UTF-8": ("frames", b"\x81\xa4type\xa8Dslc\xa4type\xa8Dsribe"),
    "a memory region of 2^63 bytes and more": ("plans", b"\x03\x03" + struct.pack("<2Q", 0xF7FFFFFFFFFFFF08, 0) + bytes(400)),
    "a coordinator whose host has a control character": ("settings", b"\x00http://40\x0f400"),
    "a size of 100 digits": ("settings", b'"' + b"5" * 100),
    "a certificate whose name is too long for a file": ("settings", b"\x02" + b"\xff" * 300),
    # By reading the code for the same kind of thing, before the fuzzer came to them.
    "a tensor's name with a digit that int() does not know": ("manifests", '[{"name":"a²b","shape":[],"dtype":"bool"}]'.encode()),
    "a tensor's name of 5,000 digits": ("manifests", b'[{"name":"' + b"1" * 5000 + b'","shape":[],"dtype":"bool"}]'),
    "an empty tensor with an extent beyond 64 bits": (
        "manifests",
        b'[{"name":"a","shape":[0,18446744073709551615],"dtype":"bool"}]',
    ),
    "tensors that only together overflow 64 bits": (
        "manifests",
        b"[" + b",".join(b'{"name":"t%d","shape":[1152921504606846976],"dtype":"bool"}' % i for i in range(16)) + b"]",
    ),
    "half a character in a tensor's name": ("header", b'{"\\ud800":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}'),
    "a request for a round that is not UTF-8": ("rounds", b'{"replicas": ["\xff"]}'),
    "a request for a round nested without end": ("rounds", b'{"replicas": ' + b"[" * 100_000),
    "an allocation beyond 64 bits": (
        "device",
        msgspec.msgpack.encode(
            {"process": "p", "device": 0, "count": 1, "layout_digest": "x", "handles": (b"h" * 64,), "ids": (1,), "bases": (0,),
             "sizes": (1 << 63,), "columns": bytes(24)}
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_well_formed_input_is_taken(name: str) -> None:
    for seed in TARGETS[name].seeds:
        if name in STRANGERS:
            TARGETS[name].run_quietly(seed)
        else:
            TARGETS[name].run(seed)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_before_is_refused(name: str) -> None:
    target, data = FOUND[name]
    if target == "settings":
        TARGETS[target].run(data)  # looks at several parsers, and raises only for a finding
        return
    if "that int() does not know" in name:
        TARGETS[target].run(data)  # an odd name, but a name
        return
    with pytest.raises(WeightSyncError):
        TARGETS[target].run(data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutations_raise_nothing_else(name: str, data: st.DataObject) -> None:
    seed = bytearray(data.draw(st.sampled_from(TARGETS[name].seeds)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(seed)))
        change = data.draw(st.sampled_from(["flip", "cut", "insert", "wide"]))
        if change == "flip" and at < len(seed):
            seed[at] ^= data.draw(st.integers(1, 255))
        elif change == "cut":
            del seed[at : at + data.draw(st.integers(1, 40))]
        elif change == "insert":
            seed[at:at] = data.draw(st.binary(max_size=12))
        else:
            number = data.draw(st.sampled_from([0, 1, -1, 1 << 31, (1 << 63) - 1, -(1 << 63), 1 << 62, 1 << 40]))
            seed[at : at + 8] = struct.pack("<q", number)
    TARGETS[name].run_quietly(bytes(seed))


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs Atheris: pip install '.[fuzz]'")
@pytest.mark.timeout(SECONDS + 150)
def test_a_guided_search_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.coverage_guided", f"--seconds={SECONDS}", f"--findings={tmp_path / 'findings'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + 140, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{result['executions']} inputs")
    assert result["executions"] > 1000
    assert not result["never_run"]
