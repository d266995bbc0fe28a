"""Holds what is taken for vLLM's shared memory: what processes of a group have mapped, under vLLM's names, and nothing else."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
from examples.demo.leftovers import free, mapped_by


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_group_has_mapped_is_found_and_freed() -> None:
    files = {name: Path(f"/dev/shm/{name}_leftovers_{os.getpid()}") for name in ("psm", "vllm_dist", "other")}
    unmapped = Path(f"/dev/shm/psm_unmapped_{os.getpid()}")
    mapped = []
    try:
        for file in (*files.values(), unmapped):
            file.write_bytes(b"x" * mmap.PAGESIZE)
        for file in files.values():
            with file.open("r+b") as opened:
                mapped.append(mmap.mmap(opened.fileno(), mmap.PAGESIZE))
        found = mapped_by(os.getpgid(0))
        mine = {path for path in found if path.endswith(f"_{os.getpid()}")}
        assert mine == {str(files["psm"]), str(files["vllm_dist"])}
        free([*mine, "/dev/shm/psm_that_never_was"])
        assert [name for name, file in files.items() if file.exists()] == ["other"]
    finally:
        for memory in mapped:
            memory.close()
        for file in (*files.values(), unmapped):
            file.unlink(missing_ok=True)
